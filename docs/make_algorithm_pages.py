"""Writes docs/algorithms: a page per algorithm, an index, and pictures of the plans (`make docs`).

Pages are generated from the registry, the algorithms' files, the tuned hyperparameters and docs/results.md,
except for the section "Implementation details". That section is written by hand, in the page, and kept.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from algorithm_facts import (
    ACTION_SPACES,
    DOCS,
    WORKERS,
    example,
    field_help,
    losses,
    picture,
    read_results,
    reported_metrics,
    supported_actions,
)

from rollstream.algos import ALGORITHMS, module_of
from rollstream.rl.algorithm import Algorithm
from rollstream.training.tuned import tuned, tuned_environments

PAGES, PICTURES = DOCS / "algorithms", DOCS / "images" / "algorithms"
DETAILS = "Implementation details"
WIDTH = 120
METRICS = {
    "rollout/ep_rew_mean": "Mean return of the last 100 episodes.",
    "rollout/ep_len_mean": "Mean length of the last 100 episodes.",
    "rollout/episodes": "Number of episodes so far.",
    "rollout/exploration_rate": "Exploration rate (epsilon): the mean, if each environment has its own.",
    "adaptation/return_before": "Mean return of the episodes before any adaptation.",
    "adaptation/return_after": "Mean return of the episodes after the last adaptation.",
    "train/loss": "Total loss.",
    "train/policy_gradient_loss": "Policy part of the loss.",
    "train/policy_loss": "Policy part of the loss.",
    "train/value_loss": "Mean squared error of the values, before its coefficient.",
    "train/entropy_loss": "Minus the mean entropy of the policy, before its coefficient.",
    "train/actor_loss": "Loss of the actor.",
    "train/critic_loss": "Loss of the critics, summed.",
    "train/q_value": "Mean Q value of the batch's actions.",
    "train/entropy": "Mean entropy of the actor, estimated by minus the log probability of its actions.",
    "train/ent_coef_loss": "Loss of the temperature.",
    "train/ent_coef": "Temperature (alpha), the entropy coefficient.",
    "train/approx_kl": "Approximate KL divergence of the new policy from the old, E[ratio - 1 - log ratio].",
    "train/clip_fraction": "Fraction of the steps whose ratio is outside the clipping range.",
    "train/clip_range": "Clipping range.",
    "train/explained_variance": "Fraction of the returns' variance that the values explain; 1 is perfect.",
    "train/grad_norm": "Global norm of the gradients, before clipping.",
    "train/learning_rate": "Learning rate.",
    "train/beta": "Importance-sampling exponent (beta); without effect in uniform replay.",
    "train/n_updates": "Number of updates so far: epochs of PPO and APPO, gradient steps of all others.",
    "replay/size": "Number of transitions in the replay buffer; of R2D2, sequences.",
    "replay/samples_per_insert": "Average number of times a transition or sequence has been sampled.",
    "replay/lost_items": "Number of transitions or sequences lost with replay shards that died.",
    "weights/staleness": "How many updates old the weights were that rollouts were sampled with; the mean.",
    "weights/staleness_p50": "Median of the staleness since the last report.",
    "weights/staleness_p90": "90th percentile of the staleness since the last report.",
    "weights/staleness_max": "Maximum of the staleness since the last report.",
    "time/total_timesteps": "Number of environment steps so far.",
    "time/iterations": "Number of reports so far.",
}
"""What a metric of a report means. Reports average over all updates since the last one."""
SHARED_METRICS = {
    "rollout/success_rate": 'Mean `info["is_success"]` of the last 100 episodes, if environments report it.',
    "time/fps": "Environment steps per second since the start, or since the run was resumed.",
    "time/time_elapsed": "Seconds of training.",
    "eval/mean_reward, eval/std_reward": "Mean and standard deviation of the returns of an evaluation.",
    "eval/mean_ep_length": "Mean length of an evaluation's episodes.",
    "eval/best_mean_reward": "Best mean return of all evaluations so far.",
    "flow/NODE/items, flow/NODE/busy": "Items that a node of the plan has processed, and its busy seconds.",
    "flow/bottleneck": "The node that limits the throughput.",
    "events/deaths, events/ACTOR": "Number of actors that died, and for each the reason and the outcome.",
}
"""Further metrics, which the run adds to a report."""


# Metrics -----------------------------------------------------------------------------------------


def described_metrics(name: str) -> list[str]:
    """Names of the metrics that an algorithm reports, in the order of their descriptions."""
    reported = reported_metrics(name)
    if unknown := reported - METRICS.keys():
        sys.exit(f"describe {', '.join(sorted(unknown))} in METRICS, in docs/make_algorithm_pages.py")
    return [metric for metric in METRICS if metric in reported]


def documented_metrics(name: str) -> list[str]:
    """Names of the metrics in the page as it is."""
    return re.findall(
        r"^\| `([a-z]+/[a-z0-9_]+)` \|", (PAGES / f"{name}.md").read_text("utf-8"), re.MULTILINE
    )


# Markdown ----------------------------------------------------------------------------------------


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    heading = list(heading)
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(value: Any) -> str:
    """A value as code: large integers with underscores, TOML's lists as tuples."""
    value = tuple(value) if isinstance(value, list) else value
    return f"`{value:_}`" if type(value) is int and value >= 10_000 else f"`{value!r}`".replace("'", '"')


def linked(text: str) -> str:
    """Text with links to papers."""
    text = re.sub(r"doi:([\w./]+\w)", r"[doi:\1](https://doi.org/\1)", text)
    text = re.sub(r"https://openreview\.net/forum\?id=(\w+)", r"[openreview:\1](\g<0>)", text)
    text = re.sub(r"https://arxiv.org/abs/([\d.]+\d)", r"arXiv:\1", text)
    return re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def paragraphs(text: str) -> str:
    """The paragraphs of a docstring; an equation has lines of its own."""
    blocks = re.sub(r"(\$\$.*?\$\$)", r"\n\n\1\n\n", text, flags=re.DOTALL).split("\n\n")
    return "\n\n".join(_block(" ".join(block.split())) for block in blocks if block.strip())


def _block(text: str) -> str:
    if text.startswith("$$"):  # one line: Markdown would take one that starts with a plus for a list
        return f"$$\n{text.strip('$')}\n$$"
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def source_link(module: str) -> str:
    """A link to the file of a module."""
    path = f"src/{module.replace('.', '/')}.py"
    return f"[`{path}`](../../{path})"


# Pages -------------------------------------------------------------------------------------------


def page(name: str, metrics: Iterable[str]) -> str:
    """The page of an algorithm that reports these metrics."""
    algorithm, (env, steps) = ALGORITHMS[name], example(name)
    title, reference, text = introduction(name)
    loss_module, equations = losses(algorithm)
    sections = {
        "How to run it": usage(algorithm, env, steps),
        "Plan": plan_section(algorithm),
        "Loss": _origin("loss", name, loss_module) + "\n\n".join(map(paragraphs, equations)),
        DETAILS: details(name),
        "Settings": settings(algorithm),
        "Metrics": table(["metric", "meaning"], ([f"`{own}`", METRICS[own]] for own in metrics))
        + "\n\n[Every run](README.md#metrics) has some more.",
        "Tuned settings": tuned_section(algorithm),
        "Results": results_section(name),
    }
    note = f"<!-- Generated by `make docs`, except for the section {DETAILS!r}: edit that one here. -->"
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"{note}\n\n# {title}\n\nPaper: {reference}\n\n{text}\n\n{body}\n"


def introduction(name: str) -> tuple[str, str, str]:
    """Title, paper and further text of an algorithm: `Title (paper)` is the first line of its file."""
    first, _, rest = (inspect.getdoc(sys.modules[module_of(name)]) or "").partition("\n\n")
    found = re.fullmatch(r"(.*?) \((.*?)\)(.*)", first, re.DOTALL)
    if found is None:
        raise ValueError(f"the first line of {module_of(name)} must be: Title (paper, link).")
    return found[1], linked(found[2] + found[3]), paragraphs(linked(rest))


def _origin(part: str, name: str, module: str) -> str:
    """A sentence about a part that is another algorithm's."""
    return "" if module == module_of(name) else f"The {part} is that of {source_link(module)}.\n\n"


def usage(algorithm: Algorithm[Any], env: str, steps: int) -> str:
    """Commands."""
    name, num_envs = algorithm.name, algorithm.config().num_envs
    divided = "" if num_envs % WORKERS == 0 else f" --config.num-envs {WORKERS}"
    command = f"rollstream train {name} --env {env} --steps {steps}"
    actions = ", ".join(supported_actions(algorithm))
    return f"""```sh
{command}
{command} --workers {WORKERS}{divided}
rollstream train {name} --env {env} --help
```

From Python: `rs.train("{name}", env="{env}", steps={steps:_})`. [Training](../training.md) shows evaluation,
checkpoints, videos and engines.

Action spaces: {actions}. Source: {source_link(module_of(name))}."""


def plan_section(algorithm: Algorithm[Any]) -> str:
    """Source and picture of the plan."""
    name, module = algorithm.name, algorithm.plan.__module__
    return f"""{_origin("plan", name, module)}```python
{inspect.getsource(algorithm.plan).strip()}
```

![The plan of {name} as a graph, with {WORKERS} workers](../images/algorithms/{name}.svg)

`rollstream graph {name}` draws it for other settings."""


def details(name: str) -> str:
    """The section that is written by hand, as it is in the page."""
    path = PAGES / f"{name}.md"
    text = path.read_text("utf-8") if path.exists() else ""
    found = re.search(rf"^## {DETAILS}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def settings(algorithm: Algorithm[Any]) -> str:
    """The fields of the Config."""
    texts = field_help(algorithm.config)
    rows = []
    for field in fields(algorithm.config):
        assert field.default is not MISSING
        rows.append([f"`{field.name}`", code(field.default), texts[field.name].replace("|", r"\|")])
    return (
        f'On the command line `--config.NAME VALUE`, in Python `rs.train("{algorithm.name}", '
        f'config={{"NAME": value}}, ...)`.\n\n{table(["setting", "default", "meaning"], rows)}'
    )


def tuned_section(algorithm: Algorithm[Any]) -> str:
    """Tuned settings by environment."""
    name, environments = algorithm.name, tuned_environments(algorithm.name)
    if not environments:
        return "None: every environment starts from the defaults."
    by_environment = [tuned(name, env) for env in environments]
    names = [own.name for own in fields(algorithm.config) if any(own.name in each for each in by_environment)]
    rows = (
        [f"`{own}`", *(code(each[own]) if own in each else "" for each in by_environment)] for own in names
    )
    return f"Defaults for these environments.\n\n{table(['setting', *environments], rows)}"


def results_section(name: str) -> str:
    """Results with every seed, and their commands."""
    heading, results = read_results(name)
    if not results.rows:
        return "None yet."
    commands = "\n".join(results.commands)
    return f"""A gate passes if enough seeds reach the return. [Results](../results.md) has the method.

{table(heading, results.rows)}

The commands for seed 1:

```sh
{commands}
```"""


def index() -> str:
    """The page that lists all algorithms."""
    rows = []
    for name, algorithm in ALGORITHMS.items():
        supported = supported_actions(algorithm)
        actions = ("yes" if space in supported else "" for space in ACTION_SPACES)
        rows.append(
            [f"[`{name}`]({name}.md)", introduction(name)[0], *actions, ", ".join(tuned_environments(name))]
        )
    shared = (
        [", ".join(f"`{own}`" for own in names.split(", ")), text] for names, text in SHARED_METRICS.items()
    )
    return f"""<!-- Generated by `make docs`. -->

# Algorithms

Each algorithm is one file: settings, worker, loss, learner and plan. Its page shows the plan, the loss, every
setting and metric, and results with every seed.

{table(["name", "algorithm", *ACTION_SPACES, "tuned for"], rows)}

Observations may be Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these.

## Metrics

Metrics have the names of Stable-Baselines3 where it has one. A report averages over the updates since the
last one. Besides the metrics of its algorithm, a run has these:

{table(["metric", "meaning"], shared)}

## Adding an algorithm

1. Write its file in `src/rollstream/algos/`; [training](../training.md) shows how. Its page takes the text
   from the docstrings of the file, of the loss and of the settings.
2. Add it to the registry in `src/rollstream/algos/__init__.py`.
3. Add tuned settings to `src/rollstream/training/tuned.toml`, and a gate to `bench/gates.py`.
4. Run `make docs`, and write the section "{DETAILS}" of the new page.
"""


def main() -> None:
    """Write all pages and pictures."""
    for folder in (PAGES, PICTURES):
        folder.mkdir(exist_ok=True)
    for name in ALGORITHMS:
        (PICTURES / f"{name}.svg").write_text(picture(name), "utf-8")
        (PAGES / f"{name}.md").write_text(page(name, described_metrics(name)), "utf-8")
    (PAGES / "README.md").write_text(index(), "utf-8")


if __name__ == "__main__":
    main()
