"""Texts of caption files, each rule for captions, all of them together; drawn texts are functions of text and seed."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.running import Config
from lora_trainer.dataset import caption_rules
from lora_trainer.dataset.captions import read_caption_file

SHUFFLING = DataSettings(shuffle_tags=True, keep_tokens=1, caption_variants=6)
EVERYTHING: dict[str, Any] = {
    "trigger": "zibbo",
    "wildcards": True,
    "shuffle_tags": True,
    "keep_tokens_separator": "|||",
    "secondary_separator": ";;;",
    "tag_dropout": 0.3,
    "caption_prefix": "photo,",
    "caption_suffix": ", {film|digital}",
    "caption_variants": 12,
    "emphasis": True,
}
# Named rather than all of Unicode, whose tables take hypothesis seconds to build.
letters = st.text(
    alphabet="abz ,.*()[]%\n\t\u00a0\u00e9e\u0301\u2028\u202e\u732b\U0001f600", max_size=60
)
CAPTION = "one, two ||| {red|blue} hat, a;;;b, x, (y, z:1.2), w ||| last"


def drawn(caption: str, settings: DataSettings, seed: int = 1) -> tuple[str, ...]:
    """Return the texts that an image with one caption is trained with."""
    found = caption_rules.variants((caption,), settings=settings, seed=seed)
    return found[1:] or found


def plain(caption: str, **settings: Any) -> str:
    """Return the text that an image with one caption is shown and validated with."""
    return caption_rules.variants((caption,), settings=DataSettings(**settings), seed=1)[0]


def tags(text: str) -> list[str]:
    return text.split(", ")


@given(letters, st.sampled_from(["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]))
def test_marked_text_is_read_whatever_its_encoding(text: str, encoding: str) -> None:
    found = read_caption_file("a.txt", f"\ufeff{text}".encode(encoding))
    assert (found.text, found.problems) == (" ".join(text.split()), ())


def test_the_trigger_is_a_word_of_its_own() -> None:
    captions = ("", "Zibbo, a cat", "prezibbo", "[trigger] here, [trigger]")
    texts = ["zibbo", "Zibbo, a cat", "zibbo, prezibbo", "zibbo here, zibbo"]
    assert [plain(caption, trigger="zibbo") for caption in captions] == texts
    assert plain("[trigger] here") == "[trigger] here"


@given(letters, st.text(alphabet="abz .*(", min_size=1, max_size=8))
def test_the_trigger_is_put_in_once(caption: str, trigger: str) -> None:
    word = " ".join(trigger.split())
    once = plain(caption, trigger=word or None)
    assert word.casefold() in once.casefold()
    assert plain(once, trigger=word or None) == once


def test_the_class_takes_the_place_of_the_trigger() -> None:
    captions = ("a photo of ZWX, smiling", "zwxy is another word")
    data = DataSettings(trigger=" zwx", class_word=" woman ")

    def replaced(**other: object) -> list[str | None]:
        return caption_rules.class_texts(captions, settings=data.model_copy(update=other))

    assert replaced() == ["a photo of woman, smiling", None]
    assert replaced(trigger="") == [None, None], "as a folder without a trigger has it"
    assert replaced(trigger=None) == replaced(class_word=None) == []


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    ("trigger", "class_word", "caption", "of_class"),
    [
        ("小明", "男孩", "照片里的小明在跑步", "照片里的男孩在跑步"),
        ("ミナ", "女の子", "公園のミナが走る", "公園の女の子が走る"),
        ("미나", "여자", "공원에서 미나가 웃는다", "공원에서 여자가 웃는다"),
        ("มานี", "เด็ก", "รูปมานีกำลังวิ่ง", "รูปเด็กกำลังวิ่ง"),
        ("zib", "猫", "一张zib的照片", "一张猫的照片"),
        ("žib", "cat", "a ŽIB in hats", "a cat in hats"),
    ],
)
def test_a_trigger_is_found_in_text_without_blanks(
    trigger: str, class_word: str, caption: str, of_class: str, form: Any
) -> None:
    written = unicodedata.normalize(form, caption)
    assert plain(written, trigger=trigger) == written, "it is not put in twice"
    settings = DataSettings(trigger=trigger, class_word=class_word)
    (replaced,) = caption_rules.class_texts([written], settings=settings)
    assert replaced is not None
    assert unicodedata.normalize("NFC", replaced) == of_class
    # The tag with the trigger is a fixed one, and commas of these scripts part tags.
    shuffling = SHUFFLING.model_copy(update={"trigger": trigger, "tag_dropout": 1.0})
    assert set(drawn(f"红衣，公园、{written}، x", shuffling)) == {written}


def test_all_but_the_kept_tags_are_shuffled() -> None:
    caption = "zibbo, one, two, three, four"
    shown, *found = caption_rules.variants((caption,), settings=SHUFFLING, seed=1)
    assert shown == caption
    assert len(found) == 6
    assert len(set(found)) > 2
    for text in found:
        assert tags(text)[0] == "zibbo"
        assert sorted(tags(text)) == sorted(tags(caption))
    kept = drawn(caption, SHUFFLING.model_copy(update={"keep_tokens": 3}))
    assert {tuple(tags(text)[:3]) for text in kept} == {("zibbo", "one", "two")}
    assert len(set(kept)) == 2
    for text in drawn("k, a, a, b,  ", SHUFFLING):
        assert Counter(tags(text)) == Counter({"a": 2, "b": 1, "k": 1})
    in_order = DataSettings(shuffle_tags=False, caption_variants=4)
    assert caption_rules.variants(("a,b , c",), settings=in_order, seed=1) == ("a,b , c",)
    assert caption_rules.max_texts(("a,b , c",), settings=in_order) == 1


def test_texts_depend_on_the_caption_and_the_seed_alone() -> None:
    settings = DataSettings(**EVERYTHING)
    first = caption_rules.variants((CAPTION,), settings=settings, seed=1)
    assert first == caption_rules.variants((CAPTION,), settings=settings, seed=1)
    assert first[1:] != caption_rules.variants((CAPTION,), settings=settings, seed=2)[1:]
    more = settings.model_copy(update={"caption_variants": 20})
    assert caption_rules.variants((CAPTION,), settings=more, seed=1)[:13] == first


def test_a_mark_says_what_stays_in_front_and_at_the_end() -> None:
    settings = SHUFFLING.model_copy(update={"keep_tokens_separator": "|||"})
    texts = drawn("one, two ||| a, b, c, d ||| last, one more", settings)
    assert {(*tags(text)[:2], *tags(text)[-2:]) for text in texts} == {
        ("one", "two", "last", "one more")
    }
    assert len(set(texts)) > 2, "and what is between is shuffled"
    unmarked = {tags(text)[0] for text in drawn("one, a, b, c", settings)}
    assert unmarked == {"one"}, "without the mark keep_tokens counts"
    assert plain("one ||| a,b", keep_tokens_separator="|||") == "one, a, b"
    assert plain("a,b", keep_tokens_separator="|||") == "a,b", "as it is written"


def test_tags_with_the_second_mark_between_stay_together() -> None:
    settings = SHUFFLING.model_copy(update={"secondary_separator": ";;;", "tag_dropout": 0.4})
    texts = drawn("k, a;;;b ;;; c, d, e, f", settings.model_copy(update={"caption_variants": 40}))
    assert all(("a, b, c" in text) == ("b" in tags(text)) for text in texts)
    assert {("b" in tags(text)) for text in texts} == {True, False}
    assert plain("a;;;b, c", secondary_separator=";;;") == "a, b, c"


def test_alternatives_are_drawn_anew_and_the_first_is_the_plain_one() -> None:
    settings = DataSettings(wildcards=True, caption_variants=60)
    shown, *texts = caption_rules.variants(
        ("a {red|blue|} {big {old|new}|} hat",), settings=settings, seed=1
    )
    assert shown == "a red big old hat"
    assert set(texts) == {
        " ".join(["a", *colour, *size, "hat"])
        for colour in (["red"], ["blue"], [])
        for size in (["big old"], ["big new"], [])
    }
    assert drawn("{a|b}", DataSettings()) == ("{a|b}",), "braces may be meant"
    assert caption_rules.max_texts(("no braces",), settings=settings) == 1
    around = DataSettings(wildcards=True, caption_prefix="{a|b}", caption_variants=20)
    assert set(drawn("hat", around)) == {"a hat", "b hat"}
    both = around.model_copy(update={"caption_suffix": "{a|b}"})
    assert len(set(drawn("hat", both))) == 4, "each place draws for itself"


def test_tags_are_left_out_at_their_rate_and_kept_ones_never() -> None:
    settings = DataSettings(tag_dropout=0.25, keep_tokens=2, caption_variants=64)
    caption = ", ".join(f"t{number}" for number in range(40))
    shown, *texts = caption_rules.variants((caption,), settings=settings, seed=1)
    assert shown == caption
    assert all(tags(text)[:2] == ["t0", "t1"] for text in texts)
    share = 1 - sum(len(tags(text)) - 2 for text in texts) / (38 * len(texts))
    assert share == pytest.approx(0.25, abs=0.03)
    assert all(tags(text) == sorted(tags(text), key=tags(caption).index) for text in texts)
    nothing = DataSettings(tag_dropout=1.0, keep_tokens=0, trigger="zibbo")
    assert set(drawn("a, b", nothing)) == {"zibbo"}


def test_the_trigger_comes_first_and_is_never_left_out() -> None:
    settings = DataSettings(
        shuffle_tags=True, tag_dropout=0.5, trigger="zibbo", caption_variants=20
    )
    for caption in ("a, b, zibbo, c", "a, b, c", "a, b, (zibbo:1.2), c", "a, [trigger], b"):
        texts = drawn(caption, settings)
        assert all("zibbo" in tags(text)[0] for text in texts)
        assert all(text.count("zibbo") == 1 for text in texts)
        assert len(set(texts)) > 3
    first = {tags(text)[1] for text in drawn("a, b, c, d", settings) if len(tags(text)) > 1}
    assert len(first) > 1, "the trigger is the tag that is kept"
    marked = settings.model_copy(update={"keep_tokens_separator": "|||"})
    assert all(text.startswith("zibbo, a") for text in drawn("a ||| b, zibbo", marked))


def test_each_of_several_captions_is_trained_equally_often() -> None:
    lines = ("one", "two", "three")
    found = caption_rules.variants(lines, settings=DataSettings(), seed=1)
    assert found == ("one", *lines)
    assert caption_rules.max_texts(lines, settings=DataSettings()) == 3
    settings = SHUFFLING.model_copy(update={"caption_variants": 4})
    shown, *texts = caption_rules.variants(("a, b, c", "d, e, f"), settings=settings, seed=1)
    assert shown == "a, b, c"
    assert Counter(tags(text)[0] for text in texts) == {"a": 2, "d": 2}


def test_all_rules_at_once() -> None:
    settings = DataSettings(**EVERYTHING)
    shown, *texts = caption_rules.variants((CAPTION,), settings=settings, seed=1)
    assert shown == ("zibbo, photo, one, two, red hat, a, b, x, (y, z:1.2), w, last , film")
    assert len(texts) == 12
    assert len(set(texts)) > 8
    for text in texts:
        assert text.startswith("zibbo, photo, one, two, ")
        assert text.endswith((", last , film", ", last , digital"))
        assert ("a, b" in text) == (", a," in text)
        assert ("(y, z:1.2)" in text) == ("(y" in text), "commas in brackets separate nothing"
        assert "|" not in text and ";" not in text and "{" not in text
    for part in ("red hat", "blue hat", "film", "digital", "x,"):
        assert 0 < sum(part in text for text in texts) < 12, part


marked = st.text(alphabet="ab ,;|{}()[]:.12\\\u732b", max_size=40)


@example(caption="{}", prefix="", seed=0)
@given(caption=marked, prefix=marked, seed=st.integers(0, 3))
def test_any_caption_has_its_texts(caption: str, prefix: str, seed: int) -> None:
    settings = DataSettings(**{**EVERYTHING, "caption_variants": 3, "caption_prefix": prefix})
    found = caption_rules.variants((caption, "b"), settings=settings, seed=seed)
    assert len(found) == 5
    assert len(set(found)) <= caption_rules.max_texts((caption, "b"), settings=settings)
    assert all(text == " ".join(text.split()) for text in found)
    assert all("zibbo" in text for text in found)


def test_samples_are_of_captions_else_of_the_trigger_in_the_ways_of_its_kind() -> None:
    def prompts(*captions: str, concept: str = "person", count: int = 2, **data: object) -> object:
        settings = {"sampling": {"prompts_from_captions": count}, "train": {"concept": concept}}
        return caption_rules.sample_prompts(
            captions, Config.model_validate({"data": data, **settings})
        )

    assert prompts("a cat", "a cat", "", "a dog", "a bird") == ("a cat", "a dog")
    assert prompts("zib", "zib, a dog", trigger="zib") == ("zib", "zib, a dog")
    person, style = prompts("zib", trigger="zib"), prompts("zib", trigger="zib", concept="style")
    assert person == (
        "zib, portrait, looking at the camera",
        "zib, standing in a city street, full body",
    )
    assert style != person
    assert prompts(class_word="{dog}", count=1) == ("{dog}, portrait, looking at the camera",)
    assert prompts() == ("",)
