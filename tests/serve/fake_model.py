"""An artifact without a model, for tests of the server: a folder with ``fake.json``, opened by this module.

A recommendation is a sum over the history; a text repeats its prompt, one letter at a time. ``delay_ms`` is how long a
batch takes, ``item_ms`` how much longer for each request in it. Some items have effects: ``POISON`` ends the process,
``BUG`` raises, from ``SLOW`` to ``SLOW`` + 99 the batch takes that many hundredths of a second more. With
``one_front``, the first front that opens the artifact refuses it, dies of it, or stops. With ``untrusted``, requests
are encoded by decoders: this takes ``encode_ms``, ``BURN`` computes forever, ``EAT`` takes a gigabyte, ``CRASH`` ends
the process, and ``LARGE`` goes to the heavy decoder.
"""

import json
import os
import signal
from pathlib import Path
from time import sleep

import numpy as np
import torch

from intbmoe.serve.loading import Opened
from intbmoe.tasks.language.serving import GeneratePredictor
from intbmoe.tasks.serving import Encoded, Limits, Piece, Predictor
from intbmoe.tasks.serving.fields import HISTORY_FORM, REQUIRED, Flag, Integer, Many, Record, Text

LARGEST = 2**30
POISON, BUG, SLOW = 2**29 + 1, 2**29 + 2, 2**29 + 900
BURN, EAT, CRASH, LARGE = 2**29 + 11, 2**29 + 12, 2**29 + 13, 2**29 + 14
"""Written as sums, because Hypothesis tries constants from the source code and must not find these."""


def write_artifact(folder: Path, **about) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"version": "one", "action": "recommend", "delay_ms": 0, "item_ms": 0, "offset": 0} | about
    (folder / "fake.json").write_text(json.dumps(about))
    return folder


class FakePredictor(Predictor):
    dtype = torch.float64

    def __init__(self, about):
        self.about = about
        self.action = about["action"]
        self.streams = self.action == "generate"
        self.untrusted = about.get("untrusted", False)
        self.form = GeneratePredictor.form if self.streams else HISTORY_FORM
        self.limits = Limits(body_bytes=4096, top_n=10, history=100, max_tokens=200)
        if self.action == "recommend":
            fields = {
                "history": (Many(Integer(0, LARGEST), 100, least=1), REQUIRED),
                "top_n": (Integer(1, 10), 3),
                "explain": (Flag(), False),
            }
            examples = [{"history": [1, 2, 3], "top_n": 2}]
        else:
            fields = {
                "prompt": (Text(100), REQUIRED),
                "max_tokens": (Integer(1, 200), 8),
                "stream": (Flag(), True),
            }
            examples = [{"prompt": "ab", "max_tokens": 5}]
        self.record = Record(fields, "A request.", examples)
        self.request_schema = self.record.schema()

    def encode(self, request):
        found = self.record.read("", request)
        if self.action == "generate":
            return Encoded(found["max_tokens"], {"prompt": found["prompt"], "max_tokens": found["max_tokens"]})
        if self.untrusted:
            self._decode(found["history"])
        payload = {"items": np.array(found["history"], np.int64), "top_n": found["top_n"], "explain": found["explain"]}
        return Encoded(len(found["history"]), payload)

    def encoding_seconds(self, request):
        return 1.0 if LARGE in self.record.read("", request)["history"] else 0.1

    def _decode(self, items):
        sleep(self.about.get("encode_ms", 0) / 1000)
        while BURN in items:
            pass
        if EAT in items:
            bytearray(2**30)
        if CRASH in items:
            os.kill(os.getpid(), signal.SIGSEGV)

    def answer(self, batch):
        sleep((self.about["delay_ms"] + self.about["item_ms"] * len(batch)) / 1000)
        if self.action == "generate":
            return [
                {
                    "text": (text := self._text(one.payload)),
                    "new_tokens": len(text),
                    "score": -1.5,
                    "finished": "length",
                }
                for one in batch
            ]
        items = [int(item) for one in batch for item in one.payload["items"]]
        sleep(sum(item - SLOW for item in items if SLOW <= item < SLOW + 100) / 100)
        if any(POISON in one.payload["items"] for one in batch):
            os._exit(13)
        if any(BUG in one.payload["items"] for one in batch):
            raise RuntimeError("a bug in the model")
        return [self._recommend(one.payload) for one in batch]

    def _recommend(self, payload):
        total = int(payload["items"].sum()) + self.about["offset"]
        answer = {"results": [{"id": total + n, "score": 1 / (1 + n)} for n in range(payload["top_n"])]}
        if payload["explain"]:
            answer["tokens"] = [f"item {item}" for item in payload["items"].tolist()]
            chosen = [[int(item) % 4, (int(item) + 1) % 4] for item in payload["items"]]
            answer["blocks"] = [{"layer": "blocks.0.ffn", "choices": 4, "tokens": chosen}]
        return answer

    @staticmethod
    def _text(payload):
        prompt = payload["prompt"] or "?"
        return (prompt * payload["max_tokens"])[: payload["max_tokens"]]

    def stream(self, batch):
        return FakeTexts([self._text(one.payload) for one in batch], self.about["delay_ms"] / 1000)


class FakeTexts:
    def __init__(self, texts, pause):
        self.texts, self.pause, self.step, self.dropped = texts, pause, 0, set()
        self.ids, self.scores = [list(text) for text in texts], [-1.5] * len(texts)

    def __iter__(self):
        return self

    def drop(self, index):
        self.dropped.add(index)

    def __next__(self):
        going = [n for n, text in enumerate(self.texts) if n not in self.dropped and self.step < len(text)]
        if not going:
            raise StopIteration
        sleep(self.pause)
        self.step += 1
        return [
            Piece(n, self.texts[n][self.step - 1], "length" if self.step == len(self.texts[n]) else None) for n in going
        ]


def open_artifact(path, device=None):
    opened = _open(path)
    what = opened.encoder.about.get("one_front") if device is None else None
    if what is not None and _is_first(Path(path) / "claimed"):
        if what == "refuses":
            raise RuntimeError("this front cannot read it")
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[what])
    return opened


def _is_first(mark):
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _open(path):
    about = json.loads((Path(path) / "fake.json").read_text())
    sleep(about.get("load_ms", 0) / 1000)
    if about.get("broken"):
        raise RuntimeError(about["broken"])
    predictor = FakePredictor(about)
    golden = [
        {"request": request, "answer": predictor.answer([predictor.encode(request)])[0], "tolerance": 1e-9}
        for request in predictor.request_schema["examples"]
    ]
    if about.get("wrong_golden"):
        golden[0]["answer"] = {"results": []}
    return Opened(about["version"], {"task": "fake", "method": "none"}, predictor, golden)
