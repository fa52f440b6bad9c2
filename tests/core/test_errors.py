"""Tests of errors: texts without passwords, and which status a refused path has."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
from jobs import call_main, run_job, state_of, tiny

from megatronish.commands.exit_status import exit_status
from megatronish.config.config import Config
from megatronish.config.dump import resolved, to_toml
from megatronish.core.errors import RunError, UserError, is_misplaced, without_passwords
from megatronish.core.files import new_folder
from megatronish.core.remote import RemotePath
from megatronish.launch.rank import _describe

PW = "PeW0rd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"ftp://user:{PW}@host/x", "ftp://user:***@host/x"),
        (f"--save 'sftp://u:{PW}@h:22/a' and more", "--save 'sftp://u:***@h:22/a' and more"),
        (f"redis://:{PW}@host:6379", "redis://:***@host:6379"),
        (f"ftp://user:{PW}@x@host/y", "ftp://user:***@host/y"),
        (f"ftp://user:a/{PW}@host/y", "ftp://user:***@host/y"),
        (f"https://{PW}@host/x", "https://***@host/x"),
        # as a path of Python writes it
        (f"ftp:/user:{PW}@host/x does not exist", "ftp:/user:***@host/x does not exist"),
        (f"http:/host/x?token={PW}.idx", "http:/host/x?token=***"),
        ("of a:/b:c and d:/e", "of a:/b:c and d:/e"),
        (f"http://proxy:{PW}@proxy:3128 refused", "http://proxy:***@proxy:3128 refused"),
        (f"s3://b/x?X-Amz-Signature={PW}&a=1", "s3://b/x?X-Amz-Signature=***&a=1"),
        (f"s3://b/x?key=1&secret={PW}", "s3://b/x?key=1&secret=***"),
        (f"https://a.blob/x?sv=1&sig={PW}", "https://a.blob/x?sv=1&sig=***"),
        (f"https://h/x?access_token={PW}#a", "https://h/x?access_token=***#a"),
        (f"option wandb_api_key={PW}, x", "option wandb_api_key=***, x"),
        (f"Authorization: Bearer {PW}abcdefgh", "Authorization: Bearer ***"),
        (f"a token hf_{PW}abcdefghijklmnop", "a token hf_***"),
        (f"AKIA{PW.upper()}ABCDEFGHIJ", "AKIA***"),
        ("http://127.0.0.1:8000/v1@x", "http://127.0.0.1:8000/v1@x"),
        ("s3://bucket/run/a:b@c", "s3://bucket/run/a:b@c"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("sample_tokens=200 eos_token=</s> num_tokens=5", "sample_tokens=200 eos_token=</s> num_tokens=5"),
        ("tcp://host:29500", "tcp://host:29500"),
        ("data/hf_wikipedia_english_document", "data/hf_wikipedia_english_document"),
        ("runs/sk-learning-rate-of-1e-3-again", "runs/sk-learning-rate-of-1e-3-again"),
    ],
)
def test_passwords_are_stars(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
    assert without_passwords(shown) == shown
    assert str(UserError(text)) == str(RunError(text)) == shown


def test_a_path_of_a_store_shows_no_password_and_still_has_it() -> None:
    path = RemotePath(f"ftp://user:{PW}@host/x") / "y"
    assert PW in path.url
    assert PW not in f"{path} {path!r} {path.parent}" and str(path) == "ftp://user:***@host/x/y"


def test_configs_that_are_kept_have_no_password() -> None:
    url = f"ftp://user:{PW}@host/x"
    config = Config().with_fields(save=url, load=url, run_dir=url, hook_args=(f"password={PW}",), sample_prompt="a=b")
    assert PW not in to_toml(config) + json.dumps(resolved(config)) + str(config.run_dir)
    assert config.checkpoint.save == url and config.run_url == url


def test_a_failed_run_tells_no_password(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", f"--save ftp://user:{PW}@127.0.0.1:9/x --train-iters 1"), tmp_path)
    assert ended.status != 0 and "ftp://user:***@127.0.0.1:9/x" in ended.errors
    written = [path for path in tmp_path.rglob("*") if path.is_file() and PW in path.read_text(errors="replace")]
    assert not written


def test_a_config_with_stars_asks_for_the_password_or_takes_it_from_the_environment(tmp_path: Path) -> None:
    kept = tmp_path / "config.toml"
    kept.write_text('[checkpoint]\nsave = "ftp://user:***@127.0.0.1:9/x"\n')
    argv = ["--config", str(kept), *tiny(tmp_path / "run")]
    ended = call_main(argv)
    assert ended.status == 2 and "save = ftp://user:***@127.0.0.1:9/x" in ended.errors
    assert "FSSPEC_FTP_PASSWORD" in ended.errors
    assert call_main([*argv, "--save", str(tmp_path / "save"), "--train-iters", "1"]).status == 0
    ended = call_main(argv, FSSPEC_FTP_PASSWORD=PW)
    assert "ftp://user@127.0.0.1:9/x cannot be written" in ended.errors


def test_a_run_resumes_with_a_password_that_none_of_its_files_has(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", f"--mlflow-tracking-uri http://user:{PW}@host/x --train-iters 1")
    assert call_main(argv).status == 0
    assert state_of(tmp_path / "run", 1)["config"]["log"]["mlflow_tracking_uri"] == "http://user:***@host/x"
    again = call_main([*argv, "--train-iters", "2"])
    assert again.status == 0 and "tracking" not in again.output.partition("changed since")[2]
    assert PW not in again.output + again.errors
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and PW.encode() in path.read_bytes()]


def test_a_path_that_the_system_refuses_is_a_mistake_and_a_failing_disk_is_none(tmp_path: Path) -> None:
    """The launcher starts a rank again after status 1, and not after 2."""
    for number, status in ((errno.EACCES, 2), (errno.ENOTDIR, 2), (errno.ENAMETOOLONG, 2), (errno.EIO, 1)):
        error = OSError(number, os.strerror(number), str(tmp_path / "x"))
        assert _describe(error)[0] == status
        assert exit_status(partial(_raise, error)) == status
    assert not is_misplaced(OSError(errno.EACCES, "of no file"))
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be written: Not a directory; no partial file is left; name another"),
        new_folder(tmp_path / "file" / "below", decisive="a"),
    ):
        pass


def test_an_error_of_what_is_read_is_not_told_as_one_of_the_folder_that_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "weights", tmp_path / "model"
    with pytest.raises(FileNotFoundError) as caught, new_folder(target, decisive="a"):
        source.read_bytes()
    assert caught.value.filename == str(source)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="model cannot be written"), new_folder(target, decisive="a") as partial:
        (partial / "missing" / "a").write_bytes(b"")


def _raise(error: BaseException) -> int:
    raise error
