"""Secrets in text are found, masked, and never taken for something else."""

from __future__ import annotations

import pytest

from storage.files import masking

TOKEN = "hf_" + "aB3" * 12
SECRETS = {
    "s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY@bucket/x": "wJalrXUtnFEMI",
    "s3://key:secret@bucket": "secret",
    "https://somebody:pass%2Fword@proxy.local:3128/": "pass%2Fword",
    "https://ghp_abcdefghijklmnopqrstuvwxyz0123456789@github.com/a/b": "ghp_",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Signature=abcdef0123&X-Amz-Expires=60": "abcdef0123",
    "https://x.blob.core.windows.net/c?sv=1&sig=Zm9vYmFy%3D": "Zm9vYmFy",
    "gs://bucket/x?access_token=ya29.abc&scheme=https": "ya29",
    "https://hub.local/api?api_key=12345678": "12345678",
    f"the hub said no to {TOKEN}": TOKEN,
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
}
HARMLESS = [
    "s3://bucket/path?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1",
    "gs://anonymous@bucket/x",
    "http://127.0.0.1:8265",
    "http://127.0.0.1:8265/a@b",
    "hub:OWNER/NAME",
    "someone@example.org wrote to s3://bucket/x",
    "tokenizer/path?x=1",
    "runs/monkey=1",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_found_and_masked_and_the_rest_stays(text: str) -> None:
    assert masking.find(text) is not None
    masked = masking.mask(f"before {text} after")
    assert SECRETS[text] not in masked
    assert masking.MASK in masked
    assert (masked.split()[0], masked.split()[-1]) == ("before", "after")
    assert masking.find(masked.replace(f"{masking.MASK}@", "").replace(f"={masking.MASK}", "=")) is None
    with pytest.raises(ValueError, match="the place") as refused:
        masking.refuse(text, "the place")
    assert SECRETS[text] not in str(refused.value)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_one_is_left_alone(text: str) -> None:
    assert masking.find(text) is None
    assert masking.mask(text) == text
    masking.refuse(text, "it")


def test_this_process_own_secrets_are_masked_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIK7MDENG")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-and-long-enough")
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/home/me/a-long-path-to-it")
    text = "wJalrXUtnFEMIK7MDENG 0123456789abcdef0123456789abcdef01234567 false-and-long-enough short"
    assert masking.mask(text) == "*** *** false-and-long-enough short"
    assert masking.mask("/home/me/a-long-path-to-it") == "/home/me/a-long-path-to-it"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "MY_PASSWORD", "OPENAI_API_KEY")),
        *((name, False) for name in ("WANDB_MODE", "RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM", "KEYBOARD")),
    ],
)
def test_variables_are_told_by_their_names(name: str, secret: bool) -> None:
    assert masking.is_secret_name(name) is secret
