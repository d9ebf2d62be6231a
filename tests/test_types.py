"""The item types of a plan, as an editor sees them."""

from pathlib import Path

import pytest
import scripts

HERE = Path(__file__).parent


def pyright(path: Path) -> tuple[int, str]:
    done = scripts.run("-m", "basedpyright", "--project", str(HERE.parent), str(path), check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_item_types_travel_through_a_plan(tmp_path: Path) -> None:
    code, output = pyright(HERE / "typed_plans.py")
    assert code == 0, output

    wrong = tmp_path / "wrong.py"
    text = (HERE / "typed_plans.py").read_text()
    wrong.write_text(text.replace("gather_async(), Iter[Gradient])", "gather_async(), Iter[Batch])"))
    assert '"assert_type" mismatch' in pyright(wrong)[1], "the check can fail"
