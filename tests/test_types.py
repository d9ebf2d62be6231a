"""The item types of a plan, as an editor sees them."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def pyright(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "basedpyright", "--project", str(HERE.parent), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_item_types_travel_through_a_plan(tmp_path: Path) -> None:
    right = pyright(HERE / "typed_plans.py")
    assert right.returncode == 0, right.stdout

    wrong = tmp_path / "wrong.py"
    text = (HERE / "typed_plans.py").read_text()
    wrong.write_text(text.replace("gather_async(), Iter[Gradient])", "gather_async(), Iter[Batch])"))
    assert '"assert_type" mismatch' in pyright(wrong).stdout, "the check can fail"
