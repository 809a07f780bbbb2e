"""examples/notebook.ipynb, executed in a real kernel. Run: pytest tests/front/api/test_notebook.py"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import front_server
from tests.needs import package
from unisono.guard.supervise.child_process import child_environment

if TYPE_CHECKING:
    import subprocess

nbformat, nbclient = package("nbformat"), package("nbclient")
package("ipykernel")
package("matplotlib")

EXAMPLES = Path(__file__).parents[3] / "examples"


def start_kernel(command: list[str], *, env: dict[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """Forks the kernel from a process that has imported torch, in the environment that this has
    read.
    """
    return front_server.start_rank(command, env=env | child_environment(threads=1), **options)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's client, which is not ours
def test_the_notebook_trains_plots_and_gets_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setattr("jupyter_client.launcher.Popen", start_kernel)
    (tmp_path / "data").symlink_to(EXAMPLES / "data")
    shutil.copy(EXAMPLES / "notebook.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    _, trained, plotted, asked = (cell.outputs for cell in cells)
    printed = "".join(output.text for output in trained if output.output_type == "stream")
    assert "Result(completed, step 60" in printed
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "eval_loss" in line]
    assert losses[-1] < losses[0] / 2
    assert any("image/png" in output.get("data", {}) for output in plotted)
    (answer,) = [output.data["text/plain"] for output in asked if output.output_type == "execute_result"]
    assert len(answer) > 2, "in quotes"
