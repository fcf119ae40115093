import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from small_model import opinionated
from test_import_weights import write_llama
from transformers import LlamaForCausalLM

from common.errors import UsageError
from data.dataset import PackedDataset
from data.tokenizer import copy_tokenizer
from formats.import_weights import import_weights
from formats.portable import save_portable
from model import ConfigError, LMConfig, Transformer
from runs.checkpoint import OPTIMIZER, RANDOM, WEIGHTS, write_checkpoint
from runs.folder import RunFolder
from runs.weights import WeightsFolder
from training import start
from training.arguments import TrainingArguments
from training.distillation_arguments import DistillationArguments
from training.distillation_loss import distillation_loss
from training.engine import memory
from training.engine.kinds import Kind
from training.engine.launch import Engine
from training.engine.workload import Beside, Parameters
from training.resume import StartingPoint, with_own_teacher
from training.teacher import Teacher, TeacherWeights

SEQ_LEN = 32


def save(folder: Path, model: Transformer, tokenizer: Path | None = None) -> Path:
    save_portable(folder, model.config, {name: p.data for name, p in model.named_parameters()})
    if tokenizer:
        copy_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def weights(packed, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("teacher") / "run", opinionated(400, SEQ_LEN), packed)


@pytest.fixture(scope="module")
def data(packed) -> PackedDataset:
    return PackedDataset(packed, "train", SEQ_LEN)


def find(teacher: Path | str, **flags) -> TeacherWeights:
    return TeacherWeights.find(DistillationArguments(teacher=str(teacher), **flags))


@pytest.fixture
def build(weights, accelerator):
    """The teacher in a single process."""

    def build(dtype: str, folder: Path = weights, vocab_size: int = 400) -> Teacher:
        torch.manual_seed(1)
        found, engine = find(folder), Engine(accelerator, "single process", deepspeed=None)
        return Teacher(found, found.source.sha256(), engine, dtype, vocab_size)

    return build


def test_other_programs_have_none():
    assert TeacherWeights.find(TrainingArguments()) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_weights_in_the_precision_of_training(build, dtype):
    teacher, expected = build(dtype), opinionated(400, SEQ_LEN).to(getattr(torch, dtype))
    parameters = dict(teacher.model.named_parameters())
    assert len(parameters) == len(list(expected.parameters()))  # what is tied is one
    for name, parameter in expected.named_parameters():
        assert parameters[name].dtype == parameter.dtype
        assert torch.equal(parameters[name], parameter)
    assert teacher.held == sum(p.numel() * p.element_size() for p in expected.parameters())
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    assert torch.equal(teacher(tokens), expected(tokens).logits)


def test_an_output_layer_of_its_own_stays_one(build, tmp_path, packed):
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 400, "max_seq_len": SEQ_LEN}
    model = Transformer(LMConfig(**shape, tie_embeddings=False)).eval()
    teacher = build("float32", save(tmp_path / "untied", model, packed))
    tokens = torch.arange(SEQ_LEN)[None]
    assert torch.equal(teacher(tokens), model(tokens).logits)


@pytest.mark.parametrize("shards", ["one file", "several"])
def test_a_llama_of_hugging_faces_teaches_as_it_lies(build, tmp_path, shards):
    llama = write_llama(tmp_path / "llama")
    model = LlamaForCausalLM.from_pretrained(llama)
    if shards == "several":
        (llama / "model.safetensors").unlink()
        model.save_pretrained(llama, max_shard_size="40KB")
        assert len(list(llama.glob("*.safetensors"))) > 2
    teacher, tokens = build("float32", llama), torch.arange(64)[None]
    teacher.model.double()  # rounding in fp32 comes to 1e-5 by itself
    with torch.no_grad():
        expected = model.double()(tokens).logits
    for same in (teacher.model, teacher.found.source.load().double()):  # and for a recording
        torch.testing.assert_close(same(tokens).logits, expected, atol=1e-5, rtol=0)
    import_weights(llama, tmp_path / "imported")
    assert WeightsFolder.find(str(tmp_path / "imported")).sha256() == teacher.sha256


def test_of_hugging_faces_folders_it_takes_safetensors_alone(build, tmp_path):
    llama = write_llama(tmp_path / "llama")
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no safetensors: python -m scripts.import_weights"):
        build("float32", llama)
    (llama / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no weights"):
        build("float32", llama)
    save_file({"model.other.weight": torch.zeros(1)}, llama / "model.safetensors")
    with pytest.raises(ConfigError, match=r"llama: model.other.weight is in no Llama"):
        build("float32", llama)
    for name in llama.iterdir():
        name.unlink()
    config = json.loads((write_llama(llama) / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_attention_heads": 9}))
    with pytest.raises(ConfigError, match=r"wq.weight is \(48, 48\), the model has \(72, 48\)"):
        build("float32", llama)
    (llama / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match=r"llama: no readable weights"):
        build("float32", llama)


def test_its_logits_have_no_gradient_and_may_be_compared_with_some_that_have(build):
    tokens, student = torch.arange(SEQ_LEN)[None], opinionated(400, SEQ_LEN)
    teacher = build("float32")
    (student(tokens).logits * teacher(tokens)).sum().backward()
    assert all(p.grad is None for p in teacher.model.parameters())
    assert all(p.grad is not None for p in student.parameters())


def test_its_forward_pass_is_a_third_of_a_step(weights):
    model = opinionated(400, SEQ_LEN)
    assert find(weights).flops_per_token(16) == model.flops_per_token(16) / 3


def test_the_hash_is_that_of_the_weights_wherever_they_are(weights, tmp_path):
    model = opinionated(400, SEQ_LEN)
    tensors = {name: p.data for name, p in model.named_parameters()}
    state = {"step": 1, "model": model.config.to_dict(), "processes": 1, "optimizer_step": 1}
    run, files = RunFolder(tmp_path / "run"), {WEIGHTS: tensors, OPTIMIZER: {}, RANDOM: {}}
    write_checkpoint(run, files, state | {"identity": {}})
    first = WeightsFolder.find(str(weights)).sha256()
    assert WeightsFolder.find(str(run.checkpoint(1))).sha256() == first
    tensors["norm.weight"][3] += 1e-3
    write_checkpoint(run, files, state | {"step": 2, "identity": {}})
    assert WeightsFolder.find(str(run.checkpoint(2))).sha256() != first


@pytest.fixture
def begin(monkeypatch):
    """Starts a new run of a process with a GPU, with a teacher that has been found, up to where the
    teacher would be built."""

    def built(*how):
        raise UsageError("it is being built")

    def begin() -> None:
        args, place = DistillationArguments(), {"num_processes": 1, "device": torch.device("cuda")}
        accelerator = SimpleNamespace(is_main_process=False, is_local_main_process=True, **place)
        monkeypatch.setattr(start, "find_start", lambda *run: (StartingPoint(None), args))
        monkeypatch.setattr(start, "plan_compilation", lambda *run: None)
        nothing = {"require_processes": lambda: None, "require_fit": lambda data: None}
        config = LMConfig(vocab_size=400, max_seq_len=SEQ_LEN)
        beside = Beside(Parameters.of(config), Kind(stage=3, parameters_on="cpu"))
        found = {"sha256": lambda: "5" * 64, "beside": beside, "build": built} | nothing
        initial = SimpleNamespace(config=lambda data: config)
        sets = {"train_set": range(1000), "val_set": None, "started": 0.0}
        teacher = SimpleNamespace(**found)
        engine = Engine(accelerator, "DDP", None)
        start.start_run(args, engine, initial, **sets, found_teacher=teacher)

    return begin


def test_every_process_says_which_weights_it_has_found(begin, monkeypatch):
    """Each reads its own disk; the path alone is that of the main process."""
    told = []

    def compare(engine, facts: dict) -> None:
        told.append(facts)
        raise UsageError("rank 1 has another")

    monkeypatch.setattr(start, "require_the_same", compare)
    with pytest.raises(UsageError, match="rank 1 has another"):
        begin()
    assert told == [{"teacher": "5" * 16}]


def test_ram_that_will_not_do_for_a_teacher_is_said_before_it_is_built(begin, monkeypatch, capsys):
    for free, warns in ((0, True), (2**50, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        with pytest.raises(UsageError, match="it is being built"):
            begin()
        assert ("WARNING: what is offloaded" in capsys.readouterr().out) == warns


def test_room_for_more_pieces_than_the_tokenizer_has_is_left_out(build, data, packed, tmp_path):
    """As models of others often have it, for a round number."""
    model, tokens = opinionated(448, SEQ_LEN), torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    folder = save(tmp_path / "roomy", model, packed)
    find(folder).require_fit(data)
    theirs = build("float32", folder)(tokens)
    assert torch.equal(theirs, model(tokens).logits[..., :400])
    how = {"alpha": 0, "temperature": 1, "kl": "forward"}
    found = distillation_loss(theirs.clone(), theirs, tokens, **how)
    assert (found.soft.item(), found.agreement.item()) == (pytest.approx(0, abs=1e-6), 1)


def refused(folder: Path, data: PackedDataset) -> str:
    with pytest.raises(UsageError) as error:
        find(folder).require_fit(data)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_a_student_must_read_what_its_teacher_does(weights, data, packed, tmp_path):
    find(weights).require_fit(data)
    longer = PackedDataset(packed, "train", 64)
    assert "reads 32 tokens at most, the student 64: pass --max_seq_len 32" in refused(
        weights, longer
    )
    smaller = save(tmp_path / "smaller", opinionated(399, SEQ_LEN), packed)
    assert "an output of 399 pieces, its tokenizer 400: they do not" in refused(smaller, data)
    alone = save(tmp_path / "alone", opinionated(400, SEQ_LEN))
    said = refused(alone, data)
    assert "has no tokenizer beside it" in said
    assert str(packed) in said


def test_the_tokenizer_must_be_the_same(weights, data):
    other = PackedDataset(data.folder, "train", SEQ_LEN)
    other.description = data.description | {"tokenizer_sha256": "0" * 64}
    said = refused(weights, other)
    assert f"{data.folder} has another tokenizer than the teacher in {weights}" in said
    assert f"--tokenizer {weights / 'tokenizer.model'}" in said


def test_what_cannot_teach_is_one_line(weights, tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        find(weights / "none")
    foreign = Path(shutil.copytree(weights, tmp_path / "foreign"))
    for config, said in (
        ('{"model_type": "llama"}', r"foreign/config.json: hidden_size is missing"),
        ('{"model_type": "gpt2"}', r"foreign/config.json: model_type is 'gpt2': only 'llama'"),
    ):
        (foreign / "config.json").write_text(config)
        with pytest.raises(ConfigError, match=said):
            find(foreign)
    with pytest.raises(
        UsageError, match=r'"zero_optimization.stage" is 2, and a teacher is divided'
    ):
        find(weights, teacher_config="ds_config.json")
    with pytest.raises(UsageError, match=r"DeepSpeed configuration none.json"):
        find(weights, teacher_config="none.json")


def test_of_its_deepspeed_file_stays_what_is_not_about_training(weights):
    found = find(weights, teacher_config="configs/zero3_offload.json").zero.config
    assert found["bf16"] == {"enabled": True}
    assert found["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert found["zero_optimization"]["memory_efficient_linear"] is False
    assert "offload_optimizer" not in found["zero_optimization"]
    assert (
        "bf16"
        not in find(
            weights, teacher_config="configs/zero3_inference.json", dtype="float32"
        ).zero.config
    )


@pytest.mark.parametrize("named", ["teacher", "teacher_logits"])
def test_a_run_that_goes_on_keeps_its_teacher_though_another_is_newer(tmp_path, named):
    def asked(**flags) -> tuple[str, str | None]:
        out = {"out_dir": str(tmp_path / "runs")}
        args = with_own_teacher(DistillationArguments(**out | flags))
        return args.teacher, args.teacher_logits

    assert asked(resume="auto") == ("auto", None)
    run = RunFolder(tmp_path / "runs" / "mine")
    state = {"step": 1, "processes": 1, "optimizer_step": 1, "identity": {}}
    write_checkpoint(run, {WEIGHTS: {}, OPTIMIZER: {}, RANDOM: {}}, state)
    own = {"teacher": None, "teacher_logits": None} | {named: "its own"}
    settings = {"program": DistillationArguments.program, "arguments": own}
    run.settings.write_text(json.dumps(settings))
    its_own = {"teacher": ("its own", None), "teacher_logits": ("auto", "its own")}
    assert asked(resume="auto") == its_own[named]
    assert asked(resume="auto", teacher="typed") == ("typed", None)
    assert asked(resume="auto", teacher_logits="typed") == ("auto", "typed")
    assert asked() == ("auto", None)
