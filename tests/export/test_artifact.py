"""The artifact on disk: what is loaded, what is refused, and that nothing in it depends on E."""

import json
import shutil
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from small_runs import small_run

from intbmoe import ComposedMoE, IntBMoE, load
from intbmoe.export import ArtifactError, load_artifact
from intbmoe.export.artifact import ABOUT, CATALOGUE, GOLDEN, MODEL, checksum, make_skeleton
from intbmoe.export.export import export_run
from intbmoe.files import file_digest
from intbmoe.version import program_version


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run("vision", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    return export_run(run, tmp_path_factory.mktemp("export") / "artifact")


@pytest.fixture
def folder(exported, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(exported.path, tmp_path / "artifact")


def edit(folder, **changes):
    """Edit the artifact as an expert would, with a matching checksum."""
    about = json.loads((folder / ABOUT).read_bytes()) | changes
    (folder / ABOUT).write_text(json.dumps({**about, "checksum": checksum(about)}))


def test_it_loads_what_was_exported(run, exported):
    artifact = load_artifact(exported.path)
    assert (artifact.task, artifact.method, artifact.dtype) == ("vision", "intbmoe", torch.float32)
    assert artifact.recipe == run.recipe
    assert artifact.about["metrics"]["test"] == {"accuracy": 0.5}
    assert artifact.catalogue["classes"] == [str(label) for label in range(10)]
    assert artifact.golden
    model, x = artifact.model(), torch.randn(3, 1, 8, 8)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(layer, IntBMoE) for layer in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(x), load(run)(x), rtol=1e-5, atol=1e-6)


def test_a_source_tree_that_is_not_installed_can_export(exported, monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    assert exported.about["written_by"] == f"intbmoe {program_version()}"
    monkeypatch.setattr("intbmoe.version.version", version)
    assert program_version() == "source"


def test_the_version_is_that_of_the_content(exported, folder):
    assert load_artifact(folder).version == exported.version == load_artifact(exported.path).version
    edit(folder, metrics={})
    assert load_artifact(folder).version != exported.version


def test_nothing_is_pickled(exported):
    kinds = {path.suffix for path in exported.path.iterdir()}
    assert kinds == {".json", ".safetensors"}


@pytest.mark.parametrize("name", [MODEL, GOLDEN])
def test_damaged_files_are_refused(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{name} is truncated or altered.*export"):
        load_artifact(folder)
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name} is missing"):
        load_artifact(folder)


def change_metrics(folder, about):
    about["metrics"]["test"]["accuracy"] = 0.99


def change_classes(folder, about):
    catalogue = json.loads((folder / CATALOGUE).read_bytes())
    (folder / CATALOGUE).write_text(json.dumps({**catalogue, "classes": catalogue["classes"][::-1]}))
    about["files"][CATALOGUE] = file_digest(folder / CATALOGUE)


def drop_golden(folder, about):
    (folder / GOLDEN).unlink()
    del about["files"][GOLDEN]


@pytest.mark.parametrize("change", [change_metrics, change_classes, drop_golden])
def test_edits_that_fit_the_other_files_are_refused(folder, change):
    about = json.loads((folder / ABOUT).read_bytes())
    change(folder, about)
    (folder / ABOUT).write_text(json.dumps(about))
    with pytest.raises(ArtifactError, match=r"artifact\.json is altered: its checksum does not match.*export"):
        load_artifact(folder)
    del about["checksum"]  # as in old artifacts
    (folder / ABOUT).write_text(json.dumps(about))
    load_artifact(folder)


def test_what_is_no_artifact_is_refused(folder, tmp_path):
    with pytest.raises(ArtifactError, match=r"not an artifact.*intbmoe export RUN"):
        load_artifact(tmp_path)
    edit(folder, format_version=2)
    with pytest.raises(ArtifactError, match="format_version 2, but this program reads 1"):
        load_artifact(folder)
    edit(folder, format_version=1, files={"../secret": "0"})
    with pytest.raises(ArtifactError, match="outside its folder"):
        load_artifact(folder)
    edit(folder, files={}, dtype="float8")
    with pytest.raises(ArtifactError, match="was not written by an export"):
        load_artifact(folder)
    (folder / ABOUT).write_text("{")
    with pytest.raises(ArtifactError, match="not complete JSON"):
        load_artifact(folder)


def test_weights_of_another_model_are_refused(folder):
    recipe = json.loads((folder / ABOUT).read_bytes())["recipe"]
    recipe["model"]["depth"] = 3
    edit(folder, recipe=recipe)
    with pytest.raises(ArtifactError, match="belongs to another model"):
        load_artifact(folder).model()
    recipe["model"]["depht"] = 3
    edit(folder, recipe=recipe)
    with pytest.raises(ArtifactError, match="did you mean 'depth'"):
        load_artifact(folder).recipe  # noqa: B018


def test_size_and_memory_do_not_depend_on_the_number_of_experts(tmp_path):
    sizes, shapes = set(), []
    for experts in (2, 32):
        artifact = export_run(small_run("vision", tmp_path, experts=experts), tmp_path / f"to-{experts}")
        sizes.add((artifact.path / MODEL).stat().st_size)
        shapes.append({name: tensor.shape for name, tensor in artifact.model().state_dict().items()})
    assert len(sizes) == 1
    assert shapes[0] == shapes[1]


def test_no_pool_is_ever_allocated(exported, monkeypatch):
    real = torch.Tensor.uniform_
    drawn = []

    def uniform(self, *args, **options):
        drawn.append(self.device.type)
        return real(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    skeleton = make_skeleton(exported.recipe, precomposed=True)
    assert all(tensor.is_meta for tensor in skeleton.state_dict().values())
    assert any(isinstance(layer, ComposedMoE) for layer in skeleton.modules())
    assert set(drawn) <= {"meta"}
    before = torch.get_rng_state()
    model = exported.model()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), before)
