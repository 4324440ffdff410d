"""Deterministic workloads for comparing engines on the same model, prompts and lengths.

Each workload is a list of requests {prompt, max_tokens} grouped in waves: all requests of a wave are
sent at once, the next wave starts when the last answer of the wave before has ended.
Greedy decoding, end-of-sequence ignored, so every engine produces the same number of tokens.
"""

import json
import random
import sys

WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point home "
    "water room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name president "
    "team minute idea kid body information back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
).split()


def text(rng, words):
    """English-like text of so many words; about 1.3 tokens a word in most vocabularies."""
    out = []
    while len(out) < words:
        n = rng.randint(6, 16)
        s = [rng.choice(WORDS) for _ in range(n)]
        out += [s[0].capitalize(), *s[1:-1], s[-1] + "."]
    return " ".join(out[:words])


def build(seed=7):
    rng = random.Random(seed)
    w = {}
    # one stream: latency of one user
    w["single"] = [[{"prompt": text(rng, 100), "max_tokens": 128}]]
    # long prompt, little output: prefill speed
    w["prefill"] = [[{"prompt": text(rng, 1500), "max_tokens": 1}]]
    # many users at once, ShareGPT-like lengths, nothing shared
    w["batch"] = [
        [
            {
                "prompt": text(rng, min(600, int(rng.lognormvariate(4.6, 0.8)) + 4)),
                "max_tokens": min(256, int(rng.lognormvariate(4.4, 0.6)) + 8),
            }
            for _ in range(32)
        ]
    ]
    # one long system prompt, many short questions
    system = text(rng, 1400)
    w["shared"] = [
        [{"prompt": system + "\n\nQuestion: " + text(rng, 12) + "\nAnswer:", "max_tokens": 24} for _ in range(32)]
    ]
    # eight conversations of five turns; every turn repeats the history
    hist = [text(rng, 120) for _ in range(8)]
    waves = []
    for _ in range(5):
        hist = [h + "\nUser: " + text(rng, 40) + "\nAssistant: " for h in hist]
        waves.append([{"prompt": h, "max_tokens": 32} for h in hist])
        hist = [h + text(rng, 30) for h in hist]
    w["turns"] = waves
    # long context, one reader
    w["long"] = [[{"prompt": text(rng, 5000), "max_tokens": 64}]]
    return w


if __name__ == "__main__":
    json.dump(build(), sys.stdout)
