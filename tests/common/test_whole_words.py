"""A word is found where it stands as a word of its own, by the rules of its script, in any Unicode composition."""

from __future__ import annotations

import unicodedata

import pytest

from lora_trainer.common.caption_markup import NewWord, split_at_commas
from lora_trainer.common.whole_words import (
    holds_word,
    replaced,
    same_word,
    tags_of,
    whole_word,
    words_in,
)

# Word, texts that have it, texts that do not.
SCRIPTS = {
    "latin": ("zib", ["a ZIB cat", "zib's", "(zib)", "zib"], ["zibcat", "zib2", "zib_1", "prezib"]),
    "latin in Chinese": ("zib", ["一张zib的照片", "zib，公园"], ["一张zibs的照片"]),
    "latin in Thai": ("zib", ["ฉันรักzibมาก"], []),
    "Cyrillic": ("зиб", ["один Зиб."], ["зибка"]),
    "Chinese": ("小明", ["照片里的小明在跑步", "小明，公园", "小明"], ["大明", "小 明"]),
    "Chinese, mark of repetition": ("佐", ["佐藤"], ["佐々木"]),
    "Hiragana": ("みな", ["公園のみなが走る"], ["みんな"]),
    "Katakana": ("ミナ", ["公園のミナが走る"], ["ミナト", "アミナ", "ミナー"]),
    "Korean": (
        "미나",
        ["미나가 공원에서", "미나에게는 꽃", "미나입니다", "공원의 미나, 꽃", "A미나"],
        ["미나리", "가미나", "미나2", "미난"],
    ),
    "Thai": ("มานี", ["เด็กมานีกำลังวิ่ง"], ["มานี่"]),
    "Thai, vowel behind": ("มาน", ["รูปมาน"], ["มานะ"]),
    "Thai, vowel before": ("มา", ["รูปมา"], ["แมา"]),
    "Hindi": ("हिन", ["एक हिन है"], ["हिन्दी"]),
    "Vietnamese": ("Việt", ["một Việt nhỏ"], ["Viết"]),
    "accents": ("café", ["le CAFÉ noir"], ["cafe", "cafés"]),
    "without accents": ("cafe", ["un cafe noir"], ["café"]),
    "apostrophe": ("d'Arc", ["la d\u2019Arc", "d'arc", "d\uff07Arc"], ["d Arc", "dArc"]),
    "typographic apostrophe": ("d\u2019Arc", ["la d'Arc"], []),
    "hyphen": ("zib-cat", ["a zib\u2011cat", "a zib-cat"], ["zib cat", "zib\u2014cat"]),
    "marks": ("<zib>", ["photo of<zib>here"], ["zib"]),
    "emoji": ("\U0001f98a", ["a\U0001f98a\U0001f98a"], ["\U0001f98a\u200d\U0001f33e"]),
    "blanks": ("zib  toy", ["a zib toy", "a zib\ntoy", "zib \u3000 toy"], ["zibtoy", "zib, toy"]),
    "none": ("", [], ["", "a"]),
}  # fmt: skip


@pytest.mark.parametrize("text_form", ["NFC", "NFD"])
@pytest.mark.parametrize("word_form", ["NFC", "NFD"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_word_is_found_by_the_rules_of_its_script(
    script: str, word_form: str, text_form: str
) -> None:
    word, texts, others = SCRIPTS[script]
    written = unicodedata.normalize(word_form, word)
    forms = [unicodedata.normalize(text_form, text) for text in (*texts, *others)]
    found = [text for text in forms if holds_word(text, written)]
    assert found == forms[: len(texts)]


def test_half_composed_text_is_the_same_word() -> None:
    assert holds_word("vi\u1eb9\u0302t", "vi\u1ec7t")


def test_places_are_those_of_the_text_as_it_is_written() -> None:
    text = "les cafe\u0301, un CAFÉ"
    assert whole_word("café").sub("thé", text) == "les thé, un thé"
    word = NewWord(text="小明", tokens=2)
    assert word.split("照片里的小明在跑步") == ["照片里的", "在跑步"]
    assert word.split("没有") == ["没有"]
    assert NewWord(text="é", tokens=1).pieces("a e\u0301 b") == [(0, 2), (4, 6)]
    assert replaced("a e\u0301 b", "\u00e9", "x") == "a x b"
    assert replaced("A a", "a", "x") == "A x"
    assert replaced("Ä e", "e", "\\1") == "Ä \\1"


def test_words_of_a_text() -> None:
    text = "A red-hat zib 小明在跑 ミナト 미나가 NAI\u0308VE"
    words = ["a", "red", "hat", "zib", "小明", "明在", "在跑", "ミナト", "미나가", "naïve"]
    assert list(words_in(text)) == words


def test_words_of_plain_text_are_those_it_has_beside_other_scripts() -> None:
    """Text of ASCII alone is read in a way of its own, which takes less time."""
    text = "".join(map(chr, range(128))) + " Red_hat's 2nd-best.x9 "
    assert [*words_in(text), "é"] == list(words_in(f"{text} é"))


def test_tags_stand_between_commas_of_any_script() -> None:
    caption = "小明，红衣、公园, zib، x,,"
    assert tags_of(caption) == ["小明", "红衣", "公园", "zib", "x"]
    assert split_at_commas("(a，b)，c", whole_brackets=True) == ["(a，b)", "c"]
    assert same_word(" CAFE\u0301 ") == same_word("café")
