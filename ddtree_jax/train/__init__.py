"""Training DFlash drafters: the target answers prompts, the drafter learns to predict blocks of those answers.

`python -m ddtree_jax train` does both; `trainer.train` is the second half as a function. Recipe: DFlash
(arXiv 2602.06036), section 4; D-PACE loss weights (arXiv 2605.18810); causal heads (`causal_head`, JetSpec).
"""
