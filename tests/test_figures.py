"""Trainer and launcher: what is wanted and what was found, in one table."""

import pytest

from lightning_dp.cluster.figures import Figure, require_agreement, slurm_figures
from lightning_dp.errors import ConfigurationError


def test_figures_that_agree_pass() -> None:
    require_agreement([Figure("nodes", 2, "trainer.num_nodes", 2, "launcher.nodes")], "set them alike")


def test_the_table_shows_all_figures_and_marks_those_that_differ() -> None:
    figures = [
        Figure("nodes", 2, "trainer.num_nodes", 2, "launcher.nodes"),
        Figure("tasks per node", 8, "trainer.devices", 4, "launcher.tasks_per_node"),
    ]
    with pytest.raises(ConfigurationError) as raised:
        require_agreement(figures, "set them alike")
    assert str(raised.value).splitlines() == [
        "what the trainer wants is not what there is; set them alike",
        "                  wanted                 found",
        "  nodes           2 (trainer.num_nodes)  2 (launcher.nodes)",
        "  tasks per node  8 (trainer.devices)    4 (launcher.tasks_per_node)  <-- differs",
    ]


STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "devices", "nodes", "differ"),
    [
        pytest.param(STEP, 2, 2, [], id="all right"),
        pytest.param(STEP, 1, 2, ["tasks per node", "tasks"], id="fewer devices"),
        pytest.param(STEP, 2, 1, ["nodes", "tasks"], id="fewer nodes"),
        pytest.param(STEP, 1, 4, ["nodes", "tasks per node"], id="as many tasks, otherwise"),
        pytest.param({"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, 2, 2, ["tasks"], id="one task per node only"),
        # A step of a part of the job counts, not the job.
        pytest.param({**STEP, "SLURM_NNODES": "4", "SLURM_NTASKS": "8"}, 2, 2, [], id="a part of the job"),
        pytest.param({}, 2, 2, [], id="nothing known"),
    ],
)
def test_slurms_figures(environment: dict[str, str], devices: int, nodes: int, differ: list[str]) -> None:
    assert [figure.name for figure in slurm_figures(environment, devices, nodes) if not figure.agrees] == differ
