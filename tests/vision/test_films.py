"""Films: frames that are looked at, their pixels, tokens, positions and logits as transformers', in every form; what is refused."""

import base64
import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from PIL import Image

import dflash_jax as dj
from dflash_jax.attention.standalone.encoder import encoder_attention
from dflash_jax.cache import extend_keys
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.cli.chat import Commands
from dflash_jax.cli.commands import main
from dflash_jax.cli.session import Session
from dflash_jax.errors import ConfigError
from dflash_jax.generation import make_requests
from dflash_jax.models import bind
from dflash_jax.serving.bodies import chat_ask, requests_of
from dflash_jax.serving.problems import Problem
from dflash_jax.text.pictures import clips
from dflash_jax.text.pictures.clips import Clip, clip_of
from dflash_jax.text.pictures.films import FilmProcessor
from dflash_jax.text.pictures.messages import films_in, pictures_in, without_pictures
from dflash_jax.text.pictures.packing import packed
from dflash_jax.text.pictures.resampling import resampled

from ..models.golden.film_words import TEMPLATE
from ..models.golden_files import TOLERANCE, difference
from ..picture_pair import FOLDER, expected, film_message, load_pictures, picture_folder, picture_model

# Texts of films follow their drafter less often than a text on average has to.
pytestmark = pytest.mark.filterwarnings("ignore:the drafter's tokens are hardly ever accepted")

PARAMS = dj.SamplingParams(max_tokens=8)
PLAIN = FilmProcessor(16, 2, 2)
BLACK = np.zeros((4, 8, 8, 3), np.uint8)


def golden() -> dict[str, np.ndarray]:
    return expected("films.npz")


def processor(folder: Path = FOLDER) -> FilmProcessor:
    tower = open_checkpoint(FOLDER).vision
    assert tower is not None
    return FilmProcessor.from_folder(folder, tower.config)


def url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def animated(frames: np.ndarray, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    first, *others = [Image.fromarray(one) for one in frames]
    first.save(file, form, save_all=True, append_images=others, **options)
    return file.getvalue()


def test_pairs_of_frames_are_those_of_transformers_processor() -> None:
    """Sampled and as large as they are, odd and smaller, one pair that is larger, many; the last frame of an odd number twice."""
    found, at, first = golden(), 0, 0
    for number, (pairs, *grid) in enumerate(found["grids"].tolist()):
        film = processor().film(found[f"film_{number}"], found["fps"][number])
        assert [one.grid for one in film.pairs] == [tuple(grid)] * pairs
        pixels = np.concatenate([one.pixels for one in film.pairs])
        np.testing.assert_allclose(pixels, found["pixels"][at : at + len(pixels)], atol=1e-6)
        at += len(pixels)
        frames, fps = len(found[f"film_{number}"]), found["fps"][number]
        places = processor().places(frames, fps)
        assert places == found["looked_at"][first : first + len(places)].tolist()
        first += len(places)
        assert len(film.times) == pairs
    assert (at, first) == (len(found["pixels"]), len(found["looked_at"]))


def test_places_and_sizes_of_published_settings() -> None:
    found, at = golden(), 0
    for (frames, fps), count in zip(found["counts"], found["place_counts"], strict=True):
        assert PLAIN.places(int(frames), fps) == found["places"][at : at + count].tolist()
        at += count
    sizes = [tuple(size) for size in found["sizes"].tolist()]
    released = FilmProcessor(16, 2, 2, fewest=4096, most=25_165_824)
    ours = [each.size_of(*size) for each in (PLAIN, released) for size in sizes]
    assert ours == [tuple(size) for size in found["sized"].tolist()]
    capped = FilmProcessor(16, 2, 2, most_tokens=768)
    for *size, height, width in found["capped"].tolist():
        assert capped.size_of(*size) == (height, width)
    assert PLAIN.size_of(8, 480, 640, 8 * 64 * 64) == (32, 64)
    assert PLAIN.places(100, 10.0, 3) == [0, 50, 99]


def test_rows_of_films_are_those_of_transformers() -> None:
    """Pairs of frames see themselves alone, as pictures do."""
    found, tower = golden(), open_checkpoint(FOLDER).vision
    assert tower is not None
    pairs = [
        pair for number in (1, 0) for pair in processor().film(found[f"film_{number}"], found["fps"][number]).pairs
    ]
    patches = packed(tower.config, [one.pixels for one in pairs], [one.grid for one in pairs])
    run = jax.jit(lambda params, patches: bind(tower.config, params)(patches, encoder_attention))
    rows = np.asarray(run(tower.load("float32"), patches))[: len(found["rows"])]
    assert difference(rows, found["rows"]) < TOLERANCE


@pytest.fixture
def model() -> dj.Model:
    found = picture_model()
    found.engine.snapshot_tokens = 16
    return found


def test_a_prompt_of_films_and_a_picture_is_transformers(model: dj.Model) -> None:
    """Tokens with times among them, positions, the first token's logits and 32 greedy ones, drafted and not."""
    found = golden()
    (request,) = make_requests(model, [film_message()], PARAMS)
    assert request.prompt == tuple(found["ids"].tolist())
    assert request.pictures is not None
    np.testing.assert_array_equal(request.pictures.positions, found["positions"].T)
    assert request.pictures.shift == found["delta"]
    assert len(request.pictures.rows) == 6
    params = dj.SamplingParams(max_tokens=32, prompt_logprobs=0, logprobs=0)
    for draft in (True, False):
        text = dj.generate(model, film_message(), params, draft=draft)
        assert text.token_ids == found["greedy"].tolist()
        theirs = found["logits"] - np.log(np.exp(found["logits"]).sum(-1, keepdims=True))
        assert text.prompt_logprobs is not None
        ours = [one.logprob for one in text.prompt_logprobs if one is not None]
        following = theirs[np.arange(len(theirs) - 1), found["ids"][1:]]
        # As for pictures: log-probabilities are smaller than logits, and as far off.
        assert difference(np.array(ours), following) < 2 * TOLERANCE


def test_keys_of_pages_name_films(model: dj.Model) -> None:
    """Prompts of equal tokens whose films differ share the pages before the first frames that do, and none from there on."""
    found, later = golden(), golden()["film_0"].copy()
    later[5:] = 255 - later[5:]
    messages = [film_message(), film_message(first=255 - found["film_1"]), film_message(second=later)]
    requests = make_requests(model, messages, PARAMS)
    assert len({request.prompt for request in requests}) == 1
    keys = []
    for request in requests:
        own = list[bytes]()
        extend_keys(own, request.prompt, 4, b"", request.marks)
        keys.append(own)
    same = [[ours == theirs for ours, theirs in zip(keys[0], other, strict=True)] for other in keys[1:]]
    assert same[0] == [True] + [False] * 19
    assert same[1] == [True] * 17 + [False] * 3, "the second pair of the second film begins with token 69"
    asked = [film_message(), film_message(second=later)]
    texts = [one.token_ids for one in dj.generate(model, asked, PARAMS)]
    assert [one.token_ids for one in dj.generate(model, asked, PARAMS)] == texts
    assert texts[0] == found["greedy"][:8].tolist()


def test_every_form_of_frames(tmp_path: Path) -> None:
    frames = golden()["film_1"]
    files = list[bytes]()
    for one in frames:
        file = io.BytesIO()
        Image.fromarray(one).save(file, "PNG")
        files.append(file.getvalue())
    for number, content in enumerate(files):
        (tmp_path / f"{number}.png").write_bytes(content)
    forms: list[Any] = [
        frames, [*frames], tuple(map(Image.fromarray, frames)), files, [tmp_path / f"{number}.png" for number in range(5)],
        [url(content, "image/png") for content in files],
        f"data:video/jpeg;base64,{','.join(base64.b64encode(content).decode() for content in files)}",
    ]  # fmt: skip
    found = [processor().film(form, 2) for form in forms]
    assert {tuple(pair.digest for pair in film.pairs) for film in found} == {
        tuple(pair.digest for pair in found[0].pairs)
    }
    assert found[0].times == (0.25, 1.25, 2.0)
    clear = np.concatenate([frames, np.full((*frames.shape[:3], 1), 255, np.uint8)], axis=3)
    clear[1, :4] = 0
    seen = list(clip_of([Image.fromarray(one, "RGBA") for one in clear], 2).seen([0, 1]))
    assert np.array_equal(seen[0], frames[0])
    assert (seen[1][:4] == 255).all(), "what is seen through is white"
    assert np.array_equal(seen[1][4:], frames[1, 4:])


def test_animated_pictures(tmp_path: Path) -> None:
    """Frames and as many a second as they have on average; a frame that says no time is shown for a tenth of a second."""
    frames = golden()["film_0"]
    lasting = [200, 300] * 4 + [500]
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        content = animated(frames, form, duration=lasting, **options)
        (tmp_path / form).write_bytes(content)
        for source in (content, tmp_path / form, url(content, "video/webp"), Image.open(io.BytesIO(content))):
            clip = clip_of(source)
            assert (clip.frames, clip.height, clip.width) == frames.shape[:3]
            assert clip.fps == pytest.approx(9 / 2.5)
            np.testing.assert_array_equal(list(clip.seen([0, 4, 8])), frames[[0, 4, 8]])
    grey = (50 * np.arange(5)).astype(np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2).repeat(3, 3)
    clip = clip_of(animated(grey, "GIF"))
    assert (clip.frames, clip.fps) == (5, 10.0)
    assert np.array_equal(np.stack(list(clip.seen(range(5)))), grey)
    assert len(processor().film(animated(grey, "GIF"), count=3).pairs) == 2


def lossless(path: Path, frames: np.ndarray, rate: int, *, form: str) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w", format=form) as file:
        stream = file.add_stream("ffv1", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "bgr0"
        for one in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24").reformat(format="bgr0")))
        file.mux(stream.encode())


@pytest.mark.parametrize("form", ["matroska", "avi"])
def test_files_of_films(form: str, tmp_path: Path) -> None:
    frames = golden()["film_3"]
    lossless(tmp_path / "film", frames, 30, form=form)
    content = (tmp_path / "film").read_bytes()
    for source in (tmp_path / "film", str(tmp_path / "film"), content, url(content, "video/x-matroska")):
        clip = clip_of(source)
        assert (clip.frames, clip.fps, clip.height, clip.width) == (60, 30.0, *frames.shape[1:3])
        np.testing.assert_array_equal(list(clip.seen([0, 20, 39, 59])), frames[[0, 20, 39, 59]])
    ours, theirs = processor().film(content), processor().film(frames, 30)
    assert [one.digest for one in ours.pairs] == [one.digest for one in theirs.pairs]
    assert ours.times == theirs.times


def test_an_mp4_and_one_that_was_cut_off(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    frames = golden()["film_3"][:, :22, :30]
    with av.open(str(tmp_path / "a.mp4"), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("mpeg4", rate=30)
        stream.height, stream.width, stream.pix_fmt, stream.bit_rate = 22, 30, "yuv420p", 4_000_000
        for one in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        file.mux(stream.encode())
    content = (tmp_path / "a.mp4").read_bytes()
    clip = clip_of(content)
    assert (clip.frames, clip.fps) == (60, 30.0)
    off = np.abs(np.stack(list(clip.seen([0, 59]))).astype(int) - frames[[0, 59]])
    assert off.mean() < 12
    film = processor().film(content[: len(content) * 2 // 3])
    assert len(film.pairs) == 2
    assert film.times[-1] < 2, "its last frame is the last one that is there"


def test_a_file_that_names_others_is_no_film(tmp_path: Path) -> None:
    """Playlists and lists of files, by whatever name they come: they begin like no film."""
    pytest.importorskip("av")
    for number, text in enumerate(
        ("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "ffconcat version 1.0\nfile '/etc/passwd'\n")
    ):
        (tmp_path / f"{number}.mp4").write_text(text)
        for source in (tmp_path / f"{number}.mp4", text.encode()):
            with pytest.raises(dj.PromptError, match="cannot be opened as a film"):
                clip_of(source)
    with pytest.raises(dj.PromptError, match="cannot be decoded as a film"):
        clip_of(b"\0\0\0\x18ftypisom" + bytes(40))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("https://a.test/b.mp4", {}, "nothing is fetched"), ("/no/such.mp4", {}, "cannot be opened as a film"),
        (BLACK, {}, "frames need fps"), (BLACK, {"fps": 0}, "frames need fps"), (5, {}, "int 5 is no film"),
        (np.zeros((4, 8, 8, 3)), {"fps": 1}, "array of float64"), (BLACK[0], {"fps": 1}, "is no film"),
        ([], {"fps": 1}, "without a frame"), ([*BLACK, BLACK[0, :, 1:]], {"fps": 1}, "has 7 x 8 pixels, the first has 8 x 8"),
        (BLACK[:1], {"fps": 1}, "at least 2 frames, this one has 1: show one frame as a picture"),
        (BLACK, {"fps": 1, "count": 5}, "num_frames=5 must be from 2 to 4"), (b"GIF89a", {"fps": 3}, "fps=3 is for frames"),
        (np.zeros((4, 4, 900, 3), np.uint8), {"fps": 1}, "more than 200 times"), (b"GIF89a", {}, "cannot be opened as a film"),
        (["data:image/png;base64,AAAA"] * 2, {"fps": 1}, "frame 0 of a film: a picture cannot be opened"),
        ("data:video/mp4,abc", {}, "data URL of a film must begin like data:video/mp4"),
    ],
)  # fmt: skip
def test_what_is_no_film(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(dj.PromptError, match=message):
        processor().film(source, **options)


def test_a_film_that_says_it_is_huge_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "MOST_FRAMES", 4)
    with pytest.raises(dj.PromptError, match="too long: at most 4 frames"):
        clip_of(np.zeros((5, 8, 8, 3), np.uint8), 1)
    with pytest.raises(dj.PromptError, match="too long"):
        clip_of(animated(golden()["film_0"], "GIF"))
    monkeypatch.setattr(clips, "MOST_PIXELS", 63)
    with pytest.raises(dj.PromptError, match="at most 63"):
        clip_of(np.zeros((4, 8, 8, 3), np.uint8), 1)


def test_without_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(
        dj.PromptError, match=r"decoded by PyAV, which is not installed: pip install 'dflash-jax\[vision\]'"
    ):
        clip_of(b"\0\0\0\x18ftypisom" + bytes(40))


def test_a_file_with_fewer_frames_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is all of it: other frames are looked at, as of a film of that length."""
    frames = golden()["film_0"]

    def seen(places: Any) -> Any:
        for place in places:
            if place >= 7:
                raise clips.Ended(7)
            yield frames[place]

    monkeypatch.setattr("dflash_jax.text.pictures.films.clip_of", lambda *_: Clip(9, 4.0, 24, 16, seen))
    cut = processor().film(None)
    assert [one.digest for one in cut.pairs] == [one.digest for one in processor().film(frames[:7], 4).pairs]


def test_what_a_folder_says_of_films(tmp_path: Path) -> None:
    """The file of the whole processor, then that of films, then that of pictures, as transformers has it; and nothing at all."""
    said = json.loads((FOLDER / "video_preprocessor_config.json").read_text())
    assert (processor(tmp_path).fewest, processor(tmp_path).most_frames, processor(tmp_path).fps) == (131_072, 768, 2.0)
    (tmp_path / "preprocessor_config.json").write_text((FOLDER / "preprocessor_config.json").read_text())
    assert (processor(tmp_path).fewest, processor(tmp_path).most_frames) == (256, 768)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(said | {"cap_pixels_per_frame": True}))
    assert (processor(tmp_path).most_frames, processor(tmp_path).most_tokens) == (12, 768)
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": said}))
    assert processor(tmp_path) == processor()
    for change, message in (
        ({"patch_size": 14}, "patch_size is 14, the vision tower's is 4"), ({"min_frames": 20}, "20 and 12 frames are none"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "are none"), ({"do_resize": False}, "do_resize must be True"),
        ({"do_sample_frames": False}, "sampled by fps"), ({"fps": 0}, "fps must be positive"), ({"max_frames": 1}, "at least 2"),
    ):  # fmt: skip
        (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": said | change}))
        with pytest.raises(ConfigError, match=message):
            processor(tmp_path)


def test_films_of_messages_in_every_way_they_are_written() -> None:
    parts = [
        {"type": "video", "video": 1, "fps": 2}, {"type": "text", "text": "a"}, {"image": 2},
        {"type": "video_url", "video_url": {"url": "data:3", "num_frames": 4}}, {"video": 5, "max_pixels": 64},
        {"type": "video", "path": "6"}, {"type": "video_url", "video_url": "data:7"},
    ]  # fmt: skip
    messages = [{"role": "user", "content": parts}]
    found = films_in(messages)
    assert [one.given for one in found] == [1, "data:3", 5, "6", "data:7"]
    assert [(one.fps, one.frames, one.most) for one in found[:3]] == [
        (2, None, None),
        (None, 4, None),
        (None, None, 64),
    ]
    assert [one.given for one in pictures_in(messages)] == [2]
    played = {"type": "video"}
    assert without_pictures(messages)[0]["content"] == [played, parts[1], {"type": "image"}, *[played] * 4]
    for wrong, message in (
        ({"type": "video"}, r"messages\[0\], part 0 holds no film"),
        ({"video": 1, "num_frames": 0}, "num_frames must be a positive"),
    ):  # fmt: skip
        with pytest.raises(dj.PromptError, match=message):
            films_in([{"role": "user", "content": [wrong]}])


def test_a_request_to_the_server_holds_its_film(model: dj.Model) -> None:
    frames = golden()["film_0"]
    held = url(animated(frames, "PNG", duration=250), "image/png")

    def asked(part: Any) -> Any:
        parts = [{"type": "text", "text": "w1"}, {"type": "video_url", "video_url": part}]
        return chat_ask({"messages": [{"role": "user", "content": parts}], "max_tokens": 4}, TEMPLATE)

    (request,) = requests_of(model, asked({"url": held}))
    parts = [{"type": "text", "text": "w1"}, {"type": "video", "video": frames, "fps": 4}]
    (same,) = make_requests(model, [[{"role": "user", "content": parts}]], PARAMS)
    assert (request.prompt, request.marks) == (same.prompt, same.marks)
    assert request.prompt == (1, 102, 4, 7, 102, *[101] * 6, 103, 16, 7, 102, *[101] * 6, 103, 103)
    (fewer,) = requests_of(model, asked({"url": held, "num_frames": 2}))
    assert fewer.prompt == (1, 102, 10, 7, 102, *[101] * 12, 103, 103), "two frames of so few pixels are larger"
    still = url(animated(frames[:1], "PNG"), "image/png").partition(",")[2]
    (told,) = requests_of(model, asked({"url": f"data:video/jpeg;base64,{still},{still}", "fps": 1}))
    assert told.prompt[:4] == (1, 102, 5, 7)
    for elsewhere in ("http://a.test/b.mp4", "file:///etc/passwd", "/etc/passwd", ["data:image/png;base64,AAAA"]):
        with pytest.raises(Problem, match="nothing is fetched"):
            asked({"url": elsewhere})
    with pytest.raises(Problem, match="num_frames"):
        asked({"url": held, "num_frames": "many"})
    with pytest.raises(Problem, match="others are not supported"):
        chat_ask({"messages": [{"role": "user", "content": [{"type": "video", "video": "/etc/passwd"}]}]}, TEMPLATE)


@pytest.mark.few
def test_a_conversation_about_a_film(
    model: dj.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python with frames, and at the terminal with a file."""
    frames = golden()["film_0"]
    chat = dj.Chat(model, dj.SamplingParams(max_tokens=4))
    read = Mock(wraps=clip_of)
    monkeypatch.setattr("dflash_jax.text.pictures.films.clip_of", read)
    first = chat.say("w1 w2", videos=[{"video": frames, "fps": 4}])
    read.assert_called_once()
    second = chat.say("w3")
    assert chat.history[0]["content"][0]["type"] == "video"
    told = [*chat.history[:2], {"role": "user", "content": "w3"}]
    assert dj.generate(model, told, dj.SamplingParams(max_tokens=4)).token_ids == second.token_ids
    file = tmp_path / "a.png"
    file.write_bytes(animated(frames, "PNG", duration=250))
    monkeypatch.setattr("dflash_jax.model.load", lambda *_, **__: model)
    monkeypatch.setattr("dflash_jax.cli.commands.begin", lambda _: None)
    line = ["generate", "w1 w2", "--video", str(file), "--max-tokens", "4", "--model", str(picture_folder())]
    assert main([*line, "--chat"]) == 0
    assert capsys.readouterr().out.strip() == first.text.strip()
    assert main(line) == 2
    chat.reset()
    commands = Commands(chat, Session(), stats=False)
    assert commands.obey(f"/video {file}")
    commands.answer("w1 w2")
    assert chat.history[0]["content"][0] == {"type": "video", "video": str(file)}
    assert capsys.readouterr().out.startswith(first.text.strip())
    with pytest.raises(dj.PromptError, match="cannot be opened"):
        commands.obey("/video /no/such.mp4")
    with pytest.raises(dj.ParameterError, match="videos must be a list"):
        chat.say("w1", videos="a.mp4")  # type: ignore[arg-type]


def test_what_is_refused(model: dj.Model) -> None:
    frames = golden()["film_0"]
    parts = [{"type": "text", "text": "w1 <|video_pad|>"}, {"type": "video", "video": frames, "fps": 4}]
    with pytest.raises(dj.PromptError, match="2 places for films and 1 films"):
        dj.generate(model, [{"role": "user", "content": parts}], PARAMS)
    with pytest.raises(dj.CapacityError, match="max_tokens=150"):
        dj.generate(model, film_message(), dj.SamplingParams(max_tokens=150))


@pytest.mark.few
def test_a_model_without_its_tower() -> None:
    with pytest.raises(dj.PromptError, match="no message may hold a picture or a film: leave out the 3"):
        dj.generate(load_pictures(vision=False), film_message(), PARAMS)


def test_resampling_by_itself() -> None:
    """Frames of one colour stay as they are; others differ from Pillow's, whose weights have more bits, by one in few bytes."""
    for value in (0, 1, 127, 254, 255):
        frame = np.full((13, 7, 3), value, np.uint8)
        for size in ((5, 3), (40, 64), (13, 8), (1, 1)):
            assert np.array_equal(resampled(frame, *size), np.full((*size, 3), value)), (value, size)
    rng = np.random.default_rng(0)
    for before, (height, width) in (
        ((90, 160), (48, 80)),
        ((31, 17), (64, 96)),
        ((200, 40), (8, 40)),
        ((1, 5), (3, 2)),
    ):
        frame = rng.integers(0, 256, (*before, 3), np.uint8)
        theirs = np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
        off = np.abs(resampled(frame, height, width).astype(int) - theirs)
        assert off.max() <= 1
        assert off.mean() < 0.02
