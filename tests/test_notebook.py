"""The quickstart notebook runs from top to bottom."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


# The kernel's own libraries, not ours: event loops and sockets that they leave to the garbage collector.
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_quickstart(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    text = "".join(o.get("text", "") for o in outputs)
    assert "mean accepted length" in text
    assert any("image/png" in o.get("data", {}) for o in outputs)
