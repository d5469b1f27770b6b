"""The data in the plots. Their look is not tested."""

import json

import pytest
from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import curve_difference, draw_groups, draw_means
from kvshift_lab.analysis.curves import plot_coefficients, plot_curves, plot_learning, save_figure
from kvshift_lab.analysis.panels import INTERVALS
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.statistics import t_interval
from kvshift_lab.run.finished import read_run

from .run_folders import write_pair, write_run


def lines_of(axes, style):
    return [line for line in axes.lines if line.get_marker() == style]


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_curves_of_one_pair(tmp_path):
    folders = write_pair(tmp_path, gain=0.1)
    figure = plot_curves(folders)
    losses, differences = figure.axes
    (vanilla,), (shifted,) = lines_of(losses, "o"), lines_of(losses, "s")
    assert [vanilla.get_label(), shifted.get_label()] == ["vanilla", "KV-shift"]
    assert list(vanilla.get_xdata()) == [3520, 7040, 10560, 14080, 17600, 21120]
    assert len(lines_of(losses, "None")) == 2  # training losses
    (zero,) = (line for line in differences.lines if not line.get_label() or line.get_color() == "black")
    (difference,) = lines_of(differences, "s")
    assert list(difference.get_ydata()) == pytest.approx(shifted.get_ydata() - vanilla.get_ydata())
    assert list(zero.get_ydata()) == [0, 0]
    low, high = losses.get_ylim()
    assert low < min(shifted.get_ydata())
    assert high > max(*vanilla.get_ydata(), *shifted.get_ydata()), "the first evaluation is in sight"
    assert legend_of(figure) == ["vanilla", "KV-shift"]


def test_curves_of_several_seeds_have_an_interval(tmp_path):
    folders = [folder for seed in range(3) for folder in write_pair(tmp_path, seed=seed, gain=0.1 + 0.01 * seed)]
    figure = plot_curves(folders)
    losses, differences = figure.axes
    assert legend_of(figure) == ["vanilla", "KV-shift"]
    assert figure.legends[0].get_title().get_text() == INTERVALS
    curves = [[run.series("eval", "loss")[0] for run in map(read_run, folders[at::2])] for at in (0, 1)]
    gaps = [[o - t for t, o in zip(*pair, strict=True)] for pair in zip(*curves, strict=True)]
    for axes, marker, columns in (
        (losses, "o", zip(*curves[0], strict=True)),
        (losses, "s", zip(*curves[1], strict=True)),
        (differences, "s", zip(*gaps, strict=True)),
    ):
        expected = [*columns]
        (container,) = (each for each in axes.containers if each[0].get_marker() == marker)
        line, _, (bars,) = container
        assert list(line.get_ydata()) == pytest.approx([sum(column) / 3 for column in expected])
        ends = [tuple(segment[:, 1]) for segment in bars.get_segments()]
        assert ends == [pytest.approx(t_interval(column)) for column in expected]


def test_a_mean_is_over_the_steps_that_all_seeds_have_and_of_one_seed_has_no_interval():
    axes = Figure().add_subplot()
    seeds = {0: ((1, 2, 3), (1.0, 2.0, 3.0)), 1: ((1, 3), (3.0, 5.0)), 2: ((1, 3), (2.0, 4.0))}
    draw_means(axes, {"vanilla": seeds, "KV-shift": {0: ((1,), (7,))}})
    mean, one = axes.containers[0][0], next(line for line in axes.lines if line.get_label() == "KV-shift")
    assert (list(mean.get_ydata()), list(one.get_ydata())) == ([2.0, 4.0], [7])
    assert len(axes.containers) == 1


def test_two_seeds_are_drawn_themselves():
    axes = Figure().add_subplot()
    draw_means(axes, {"vanilla": {0: ((1, 2), (1.0, 2.0)), 1: ((1, 2), (3.0, 5.0))}})
    assert not axes.containers
    assert not axes.collections
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 2.0], [3.0, 5.0], [2.0, 3.5]]


def test_the_difference_is_the_first_minus_the_other():
    assert curve_difference({4: ((1, 2), (5.0, 7.0))}, {4: ((2, 3), (4.0, 9.0)), 5: ((2,), (0.0,))}) == {
        4: ([2], [3.0])
    }


def test_without_twins_there_is_no_difference_to_draw(tmp_path):
    assert len(plot_curves([write_run(tmp_path / "alone")]).axes) == 1
    uneven = [*write_pair(tmp_path / "out"), write_run(tmp_path / "more", seed=1)]
    assert len(plot_curves(uneven).axes) == 1


def test_nothing_to_draw(tmp_path):
    with pytest.raises(LabError, match="at least one finished run"):
        plot_curves([])
    with pytest.raises(LabError, match="no finished run"):
        plot_curves([tmp_path])


def test_two_runs_of_a_variant_and_seed_are_refused(tmp_path):
    one, other = write_run(tmp_path / "lr_1e-3"), write_run(tmp_path / "lr_3e-3", steps=30)
    with pytest.raises(LabError, match=f"{one} and {other} are both KV-shift with seed 0"):
        plot_curves([one, other])


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_learning_of_a_text_is_its_loss(tmp_path):
    (losses,) = plot_learning(write_run(tmp_path / "run", steps=30) / "metrics.jsonl").axes
    training, evaluation = losses.lines
    assert list(training.get_xdata()) == [5, 10, 15, 20, 25, 30]
    assert list(evaluation.get_xdata()) == [10, 20, 30]
    assert losses.get_xlabel() == "step"


def test_learning_of_a_task_is_its_accuracy_too(tmp_path):
    lines = [
        {"kind": "eval", "step": step, "loss": 3 - step / 10, "accuracy": {"seen": step / 20, "rare": rare}}
        for step, rare in ((5, None), (10, 0.25))  # a slice may have no answers
    ]
    _, accuracy = plot_learning(write_lines(tmp_path / "metrics.jsonl", lines)).axes
    points = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in accuracy.lines}
    assert points == {"seen": ([5, 10], [0.25, 0.5]), "rare": ([10], [0.25])}


def test_before_the_first_evaluation_there_is_nothing_to_draw(tmp_path):
    lines = [{"kind": "train", "step": 5, "loss": 3.0}]
    assert plot_learning(write_lines(tmp_path / "metrics.jsonl", lines)) is None


def test_coefficients_are_those_of_the_run(tmp_path):
    *panels, _colorbar = plot_coefficients(write_run(tmp_path / "run", heads=3, layers=2)).axes
    assert panels[1].images[0].get_array().tolist() == [[0.0] * 3, [-0.25] * 3]  # layers down, heads across


def test_vanilla_has_no_coefficients(tmp_path):
    assert plot_coefficients(write_run(tmp_path / "run", shift_targets=())) is None


def test_files_are_the_same_bytes_each_time(tmp_path):
    folders = write_pair(tmp_path / "out")
    first = [path.read_bytes() for path in save_figure(plot_curves(folders), tmp_path / "curves")]
    paths = save_figure(plot_curves(folders), tmp_path / "curves")
    assert [path.name for path in paths] == ["curves.png", "curves.svg"]
    assert [path.read_bytes() for path in paths] == first
    assert first[0].startswith(b"\x89PNG")
    assert b"<svg" in first[1]


def test_the_legend_names_a_model_whose_first_group_is_empty():
    axes = Figure().add_subplot()
    draw_groups(axes, ["a", "b"], {"vanilla": [[], [1.0, 2.0]], "KV-shift": [[3.0], []]})
    assert axes.get_legend_handles_labels()[1] == ["vanilla", "KV-shift"]
