"""A small tokenizer, a fake engine behind the real front end, and the real HTTP server around them."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from serve_app.http.access.request_gate import Gate
from serve_app.http.admin import Admin
from serve_app.http.page.feed import StatusFeed
from serve_app.http.page.page_routes import add_page
from serve_app.http.routes import Operations, build_ingress
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from tests.support.clock import Clock
from tests.support.fake_serving import BackendSource, Served, ServeFake, make_backend
from tests.support.waiting import wait_for

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "one two three STOP four"] * 20


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with special tokens and a chat template, as a Hugging Face folder."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    raw.train_from_iterator(_CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS)
    wrapped.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder)


@pytest.fixture(scope="session")
def tooled(tokenizer_folder: Path) -> Tokenizer:
    """The same tokenizer with the template of ours that shows tools."""
    return Tokenizer.from_folder(tokenizer_folder, "chatml-tools")


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """A tokenizer made like Llama 2's: metaspace, byte fallback, a leading space that decoding takes away."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", *"Helowrd", "▁H", "▁He", "▁w", "ö"]
    merges = [("▁", "H"), ("▁H", "e"), ("▁", "w"), ("▁", "▁")]
    vocab = {word: index for index, word in enumerate(words)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))


@pytest.fixture(scope="session")
def tokens(folder: Path) -> list[bytes]:
    """The bytes of every id; padding has none."""
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.token_bytes(token) for token in range(512)]


@pytest.fixture(scope="session")
def compiler(folder: Path) -> StructureCompiler:
    return StructureCompiler(folder, 512, (2, 0))


@pytest.fixture(scope="module")
def serve_http() -> Iterator[Callable[[FastAPI], int]]:
    """Starts the real HTTP server around an app, and gives its port; it stops when the module's tests are over."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: FastAPI) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        wait_for(lambda: server.started, "the server's start")
        return int(listener.getsockname()[1])

    yield serve
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)


@pytest.fixture(scope="module")
def serve_fake(tokenizer: Tokenizer, serve_http: Callable[[FastAPI], int]) -> Iterator[ServeFake]:
    started: list[Served] = []

    def serve(
        limits: Limits | None = None,
        operations: Operations = Operations(),  # noqa: B008  # frozen
        *,
        admin: Admin | None = None,
        page: StatusFeed | None = None,
        gate: Gate | None = None,
        **settings: object,
    ) -> Served:
        backend, script = make_backend(tokenizer, **settings)
        asyncio.run(backend.start())
        source = BackendSource(backend)
        app = build_ingress(
            FrontEnd(source, tokenizer, backend.info, limits), operations=operations, admin=admin, gate=gate
        )
        if page is not None:
            add_page(app, page)
        port = serve_http(app)
        started.append(Served(f"http://127.0.0.1:{port}", port, backend, source, script))
        return started[-1]

    yield serve
    for served in started:
        served.close()


@pytest.fixture(scope="module")
def module_server(serve_fake: ServeFake) -> Served:
    return serve_fake()


@pytest.fixture
def server(module_server: Served) -> Iterator[Served]:
    """The module's server, idle before and after the test."""
    module_server.script.clear()
    module_server.source.requests.clear()
    yield module_server
    module_server.wait_until_idle()
