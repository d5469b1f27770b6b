"""vLLM's own server over HTTP: many clients, some of which leave, and invalid requests.

One server answers all tests of this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

from .load import CONTEXT, TOKENS, Prompt, continued, prompts_for, withstand
from .server import Server, free_port, serve

VOCABULARY, REQUESTS = 277, 200
MARGIN = 1e-3  # rounding changes logits of about 1 by a thousand times less in float32


@torch.no_grad()
def make_model() -> KVShiftLlamaForCausalLM:
    """Return a model with weights so large that the answers differ between prompts and depend on the shift."""
    torch.manual_seed(0)
    config = KVShiftLlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = KVShiftLlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.uniform_(-1, 1) if ".shift." in name else parameter.normal_(0, 0.15)
    return model


@pytest.fixture(scope="module")
def model() -> KVShiftLlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def prompts(model: KVShiftLlamaForCausalLM) -> list[Prompt]:
    """A prompt for each request, without those whose answers depend on the last bits."""
    return prompts_for(model, REQUESTS, MARGIN)


@pytest.fixture(scope="module")
def run(model: KVShiftLlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `kvshift train`, of which a server reads the model and the tokenizer beside it."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    bytes_and_merges = ByteLevelBPETokenizer()
    bytes_and_merges.train_from_iterator(["to be or not to be, that is the question"] * 2, VOCABULARY)
    model.save_pretrained(run / "model")
    PreTrainedTokenizerFast(tokenizer_object=bytes_and_merges._tokenizer).save_pretrained(run / "model")
    return run


@pytest.fixture(scope="module")
def server(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.log"
    options = (f"--max-model-len={CONTEXT}", "--max-num-seqs=16", "--max-num-batched-tokens=256", "--block-size=32")
    with Server(serve(run / "model", port, f"--served-model-name={run}", *options), log, port) as started:
        yield started


def test_without_the_shift_the_answers_are_others(model: KVShiftLlamaForCausalLM, prompts: list[Prompt]) -> None:
    """Otherwise the answers of the server would not test the shift."""
    without = KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**{**model.config.to_dict(), "shift_init": "identity"})).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".shift." not in name}
    without.load_state_dict(weights, strict=False)
    some = [prompt for prompt in prompts if len(prompt.tokens) == 64]
    answers, _ = continued(without, torch.tensor([prompt.tokens for prompt in some]))
    assert [prompt.answer for prompt in some] != answers.tolist()
    assert all(prompt.answer != answer for prompt, answer in zip(some, answers.tolist(), strict=True))


def test_the_model_has_the_given_name_and_its_tokenizer_works(server: Server, run: Path) -> None:
    (served,) = server.session.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert served["id"] == str(run)
    assert served["root"] == str(run / "model")
    text = server.post("/v1/completions", json={"model": str(run), "prompt": "to be or", "max_tokens": 3})
    assert text.status_code == 200, text.text


def test_the_client_of_the_docs(server: Server, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (client,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len([line for line in client.splitlines() if line]) <= 5
    for theirs, ours in (("http://localhost:8000", server.url), ('"demo"', repr(str(run)))):
        assert theirs in client
        client = client.replace(theirs, ours)
    exec(compile(client, "docs/serving.md", "exec"), {})
    assert capsys.readouterr().out


def test_200_requests_of_32_clients_of_which_a_third_disconnect(
    server: Server, run: Path, prompts: list[Prompt]
) -> None:
    assert withstand(server, [(str(run), prompt) for prompt in prompts]) == {}


MALFORMED = {
    "not JSON": ({"data": b'{"model": ', "headers": {"Content-Type": "application/json"}}, (400, 422)),
    "no JSON object": ({"json": [1, 2]}, (400, 422)),
    "too long": ({"json": {"prompt": [5] * CONTEXT, "max_tokens": 4}}, (400,)),
    "negative max_tokens": ({"json": {"prompt": [5], "max_tokens": -1}}, (400, 422)),
    "an unknown model": ({"json": {"prompt": [5], "max_tokens": 4, "model": "gpt-5"}}, (404,)),
    "10 MB of prompt": ({"json": {"prompt": "to be or " * (10 * 2**20 // 9), "max_tokens": 4}}, (400, 413)),
    "a token that is none": ({"json": {"prompt": [VOCABULARY + 5], "max_tokens": 4}}, (400,)),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_request_gets_an_error_and_the_next_is_answered(
    server: Server, run: Path, prompts: list[Prompt], case: str
) -> None:
    request, codes = MALFORMED[case]
    if isinstance(request.get("json"), dict):
        request = {"json": {"model": str(run), **request["json"]}}
    response = server.post("/v1/completions", **request)
    assert response.status_code in codes, response.text[:1000]
    assert response.json()["error"]["message"]
    assert server.answer(str(run), prompts[0].tokens, TOKENS) == prompts[0].answer
    assert server.metrics()["num_requests_running"] == 0
