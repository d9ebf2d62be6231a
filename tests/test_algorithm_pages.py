"""The pages of algorithms are those that `make docs` generates."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from rollstream.algos import ALGORITHMS

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("make_algorithm_pages")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_and_its_picture_are_up_to_date(generator: Any, name: str) -> None:
    """With the metrics that the page has: the next test trains to find them."""
    committed = (DOCS / "algorithms" / f"{name}.md").read_text("utf-8")
    assert committed == generator.page(name, generator.documented_metrics(name)), "run `make docs`"
    picture = (DOCS / "images" / "algorithms" / f"{name}.svg").read_text("utf-8")
    assert picture == generator.picture(name), "run `make docs`"
    assert re.search(r"^- ", generator.details(name), re.MULTILINE), "write the implementation details"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_the_metrics_that_training_reports(generator: Any, name: str) -> None:
    assert generator.documented_metrics(name) == generator.described_metrics(name), "run `make docs`"


def test_the_index_is_up_to_date(generator: Any) -> None:
    assert (DOCS / "algorithms" / "README.md").read_text("utf-8") == generator.index(), "run `make docs`"


def test_every_page_and_picture_is_of_an_algorithm() -> None:
    pages = {path.stem for path in (DOCS / "algorithms").iterdir()}
    pictures = {path.stem for path in (DOCS / "images" / "algorithms").iterdir()}
    assert pages - {"README"} == pictures == set(ALGORITHMS)


@pytest.mark.parametrize("name", [*ALGORITHMS, "README"])
def test_links_lead_to_files(name: str) -> None:
    text = (DOCS / "algorithms" / f"{name}.md").read_text("utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (DOCS / "algorithms" / link).exists()] == []
