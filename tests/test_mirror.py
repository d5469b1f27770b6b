"""The layout of tests mirrors src/kvshift: a/b.py is tested in tests/a/test_b.py or in a file listed below."""

from __future__ import annotations

from pathlib import Path

import kvshift

SOURCE = Path(kvshift.__file__).parent
TESTS = Path(__file__).parent
APART = {"integrations/vllm_plugin": "vllm", "integrations/titan": "titan"}  # these need other environments

# Modules that are tested together with the modules that use them.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "benchmarks/test_bench.py": (
        "benchmarks/cases.py",
        "benchmarks/language_model.py",
        "benchmarks/layer.py",
        "benchmarks/memory.py",
        "benchmarks/operator.py",
        "benchmarks/presets.py",
    ),
    "benchmarks/test_parity.py": ("benchmarks/formulations.py",),
    "lab/analysis/test_curves.py": ("lab/analysis/accuracy.py",),
    "lab/analysis/test_panels.py": ("lab/analysis/colors.py",),
    "lab/analysis/test_report.py": ("lab/analysis/pages.py",),
    "lab/check/test_stock_models.py": ("lab/check/check_page.py",),
    "lab/data/test_files.py": ("lab/core/atomic.py",),
    "lab/data/test_text.py": (
        "lab/data/config.py",
        "lab/data/dataset_cache.py",
    ),
    "lab/doctor/test_edge_suite.py": ("lab/doctor/small_calls.py",),
    "lab/evaluate/test_benchmarks.py": ("lab/evaluate/harness.py",),
    "lab/evaluate/test_evaluation.py": (
        "lab/evaluate/continuations.py",
        "lab/evaluate/text_scores.py",
    ),
    "lab/evaluate/test_repetition.py": ("lab/variants/continuing.py",),
    "lab/explore/test_web_runtime.py": ("lab/core/user_cache.py",),
    "lab/export/test_mlx_folder.py": ("lab/export/mlx_model.py",),
    "lab/export/test_remote_code.py": (
        "lab/export/bundling.py",
        "lab/export/portable.py",
    ),
    "lab/runs/test_loading.py": (
        "lab/core/messages.py",
        "lab/runs/model_files.py",
    ),
    "lab/tasks/igsm/test_encoding.py": ("lab/tasks/igsm/wording.py",),
    "lab/tasks/igsm/test_igsm.py": (
        "lab/tasks/igsm/random_choices.py",
        "lab/tasks/igsm/names.py",
        "lab/tasks/igsm/problem.py",
        "lab/tasks/igsm/quantities.py",
        "lab/tasks/igsm/writing.py",
    ),
    "lab/tasks/test_batch.py": ("lab/tasks/registry.py",),
    "lab/theory/test_page.py": ("lab/theory/checks.py",),
    "lab/training/test_answers.py": ("lab/tasks/questions.py",),
    "lab/training/test_twin_runs.py": ("lab/compare/samples.py",),
    "lab/training/test_task_training.py": ("lab/training/task_trainer.py",),
    "lab/training/test_train.py": ("lab/core/environment.py",),
    "lab/training/test_trainer.py": ("lab/training/optimizer.py",),
    "lab/variants/test_mixing.py": ("lab/variants/fox_shift.py", "lab/variants/key_offset.py"),
    "lab/variants/test_selective.py": ("lab/variants/selective_attention.py",),
    "lab/variants/test_variant.py": (
        "lab/variants/model_classes.py",
        "lab/variants/uncached.py",
    ),
    "layers/test_rotary.py": (
        "ops/decode.py",
        "ops/rope.py",
    ),
    "layers/test_shift.py": ("layers/options.py",),
    "models/baichuan_m1/test_head.py": ("models/baichuan_m1/adapter.py",),
    "models/baichuan_m1/test_layout.py": ("models/baichuan_m1/configuration.py",),
    "models/check/test_check_mutants.py": (
        "models/check/generated.py",
        "models/check/inputs.py",
        "models/check/properties.py",
    ),
    "models/check/test_suite.py": ("models/check/subject.py",),
    "models/llama/test_configuration.py": ("models/configuration.py",),
    "models/test_decoder.py": ("models/retrofit/family.py",),
    "ops/test_attention_inputs.py": ("ops/dispatch.py",),
    "ops/test_errors.py": ("ops/arguments.py",),
    "ops/triton/test_call.py": (
        "ops/triton/launch.py",
        "ops/triton/registration.py",
    ),
    "ops/triton/test_fused.py": (
        "ops/triton/backward.py",
        "ops/triton/forward.py",
    ),
    "recipes/test_fig01.py": (
        "recipes/fig01a/study.py",
        "recipes/fig01b/study.py",
        "recipes/induction/induction_accuracy.py",
    ),
    "recipes/test_language_models.py": (
        "recipes/fig05/study.py",
        "recipes/fig07a/study.py",
        "recipes/fig07b/study.py",
        "recipes/fig10/study.py",
        "recipes/fig11/study.py",
        "recipes/neighbours/study.py",
        "recipes/tab06/study.py",
        "recipes/tab07/study.py",
        "recipes/tab08/study.py",
        "recipes/tab09/study.py",
        "recipes/tab10/study.py",
        "recipes/tab11/study.py",
        "recipes/tab12/study.py",
        "recipes/tab13/study.py",
        "recipes/tab15/study.py",
    ),
    "recipes/test_results_pages.py": (
        "lab/study/notes.py",
        "lab/study/preset_report.py",
    ),
    "recipes/test_power_law.py": (
        "recipes/fig06/study.py",
        "recipes/scaling/power_law.py",
    ),
    "recipes/test_reproduce.py": (
        "lab/allocator.py",
        "recipes/listing.py",
    ),
    "recipes/test_studies.py": (
        "lab/study/entry.py",
        "lab/study/jobs.py",
        "lab/study/models.py",
        "lab/study/recipe.py",
        "lab/study/run_study.py",
    ),
    "titan/test_checkpoints.py": (
        "integrations/titan/hf_adapter.py",
        "integrations/titan/hf_export.py",
    ),
    "titan/test_paper_models.py": (
        "integrations/titan/config_registry.py",
        "integrations/titan/with_shift.py",
    ),
    "titan/test_parity.py": (
        "integrations/titan/llama_models.py",
        "integrations/titan/shifted_gqa.py",
    ),
    "vllm/test_decode_graph.py": (
        "integrations/vllm_plugin/decode_check.py",
        "integrations/vllm_plugin/decode_kernel.py",
    ),
    "vllm/test_families.py": (
        "integrations/vllm_plugin/served_attention.py",
        "integrations/vllm_plugin/served_models.py",
    ),
    "vllm/test_refusals.py": ("integrations/vllm_plugin/start_checks.py",),
}
NAMED = {module for modules in ELSEWHERE.values() for module in modules}


def own_file(module: Path) -> Path:
    """Return the test file of a module, each relative to its root. All modules of a recipe's folder share one file."""
    if len(module.parts) == 3 and module.parts[0] == "recipes":
        return Path("recipes") / f"test_{module.parts[1]}.py"
    return Path(APART.get(str(module.parent), module.parent)) / f"test_{module.name}"


def modules() -> list[Path]:
    """Return the modules with behaviour: not `X_config.py`, tables of command options, which `test_cli.py` covers."""
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    return sorted(path for path in paths if path.stem not in ("__init__", "__main__") and "_config" not in path.stem)


def test_every_module_has_its_tests():
    here = [module for module in modules() if str(module) not in NAMED]
    assert [str(own_file(module)) for module in here if not (TESTS / own_file(module)).exists()] == []


def test_what_is_named_is_there_and_has_no_file_of_its_own():
    assert [name for name in ELSEWHERE if not (TESTS / name).exists()] == []
    assert sorted(NAMED - {str(module) for module in modules()}) == []
    assert [module for module in sorted(NAMED) if (TESTS / own_file(Path(module))).exists()] == []


def test_folders_of_tests_are_folders_of_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (SOURCE / folder).is_dir()) == ["titan", "vllm"]
