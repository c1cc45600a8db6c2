"""Text to tokens and back: a thin layer over the `tokenizers` library, plus chat templates and streaming decode."""

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

_REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are not UTF-8 (yet)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes as the source's tokenizer.json says, and renders its chat template.

    Attributes:
      vocab_size: one more than the highest token id, added tokens included.
      chat_template: Jinja source, or None.
      special_tokens: names that a template may use ("bos_token", ...) -> text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._compiled: jinja2.Template | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two optional).

        Returns None where the folder has no tokenizer.json. Raises ValueError naming a file that cannot be read.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: cannot be read as a tokenizer: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            template = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"), folder / "tokenizer_config.json")
        named = {name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
        return cls(backend, chat_template=template, special_tokens=named)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens are added only where the tokenizer's own post-processor adds them, but
        those spelled out in `text` are read as such (as Hugging Face does). Raises ValueError on invalid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, special or not; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Renders chat messages to the text that the model was trained on.

        Args:
          messages: {"role": ..., "content": ...} in order.
          add_generation_prompt: whether to open the assistant's turn.
          kwargs: what else the template understands, e.g. `enable_thinking=False` or `tools=[...]`.

        Raises:
          ValueError: there is no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template; pass the prompt as a string")
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.chat_template)
            values = {"tools": None, "documents": None} | self.special_tokens | kwargs
            return self._compiled.render(
                **values, messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may fail in any way that Python can
            raise ValueError(f"the chat template refused the messages: {error}") from None

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of the rendered messages. The template writes every special token itself, so none is added."""
        return self.encode_rendered(self.apply_chat_template(messages, add_generation_prompt, **kwargs))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of text that a chat template rendered, or of a part of it: no special token is added."""
        return self._encode(text, add_special_tokens=False)

    def encode_rendered_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_rendered` of each text, on all cores. A ValueError does not tell which text it is about."""
        try:
            return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeError):
            raise ValueError("a text is not valid Unicode") from None

    def check_chat_template(self) -> None:
        """Raises ValueError if there is a chat template and it is not valid Jinja."""
        if self.chat_template is not None:
            try:
                _environment().from_string(self.chat_template)
            except jinja2.TemplateError as error:
                raise ValueError(f"the chat template is not valid: {error}") from None

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError):  # lone surrogates, which bytes of a command line that are not UTF-8 become
            raise ValueError(f"the text is not valid Unicode: {text[:40]!r}") from None


class IncrementalDecoder:
    """Decodes a stream of tokens without ever splitting a character.

    The pieces of all `push` calls and the final `flush` add up to the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # A window of recent tokens is decoded anew on each push: what a token reads like may depend on the one before.
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window that were complete at an earlier push
        self._sent = ""  # text of the window that is out already

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; a trailing incomplete UTF-8 sequence waits for its rest."""
        self._window.extend(int(i) for i in ids)
        text = self._tokenizer.decode(self._window)
        complete = text.rstrip(_REPLACEMENT)
        if self._window and _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(self._window[-1]) or ""):
            return ""  # byte-fallback decoders judge a run of byte tokens as a whole
        piece = complete[len(self._sent) :]
        self._sent = max(self._sent, complete, key=len)
        if complete == text and piece:  # tokens without text stay: alone they are no context for the next one
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._sent = self._tokenizer.decode(self._window)
        return piece

    def flush(self) -> str:
        """What is held back, with U+FFFD for an incomplete sequence; the decoder is empty afterwards."""
        piece = self._tokenizer.decode(self._window)[len(self._sent) :]
        self._window, self._context, self._sent = [], 0, ""
        return piece


def _environment() -> jinja2.Environment:
    """The sandbox that Hugging Face chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # Jinja's own filter escapes <, > and & for HTML, which a prompt must not have.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    environment.filters["tojson"] = tojson
    return environment


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(data).__name__}")
    return data


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _default_template(value: Any, file: Path) -> str | None:
    """A template, or the one named "default" of a list of {"name", "template"}."""
    if value is None or isinstance(value, str):
        return value
    named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if "default" not in named:
        raise ValueError(f"{file}: chat_template: expected text or a list with the name 'default', found {list(named)}")
    return named["default"]
