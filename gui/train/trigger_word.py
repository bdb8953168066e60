"""What a trigger word is worth: whether it is an ordinary word, and a rare one to offer.

Inputs: the word that somebody typed, the id of the draft. Outputs: texts of the page. The list is short and names what
people train most: a word that is not in it is not said to be rare.
"""

from __future__ import annotations

import unicodedata
from hashlib import sha256

from lora_trainer.common.whole_words import words_in

# English, then German: what a person, a pet, a thing or a look is called, and words that stand before it.
_LISTED = """
a an the my our me of in on with and
man woman men women boy girl guy lady kid child children baby person people human face body hair portrait selfie
friend mother mom father dad sister brother wife husband daughter son grandma grandpa family couple
character hero heroine princess prince king queen knight warrior wizard witch monster dragon robot alien elf
cat kitten kitty dog puppy doggy horse bird fish rabbit bunny bear lion tiger fox wolf mouse cow pig sheep duck
chicken frog owl turtle snake hamster parrot animal pet
car truck bike bicycle motorcycle bus train boat ship plane airplane house home building castle church street city
town village room kitchen garden park forest tree flower rose mountain lake river sea ocean beach sky sun moon star
chair table sofa lamp bed door window bottle cup mug glass plate bowl bag backpack shoe shoes boots hat cap shirt
dress jacket coat watch ring necklace glasses toy doll teddy plushie ball book phone camera guitar piano sword knife
food cake pizza bread apple banana coffee tea
style art artwork painting drawing sketch watercolor watercolour oil photo photograph photography picture image
anime manga cartoon comic logo icon poster pixel vintage retro film movie game design fashion product object thing
red green blue yellow orange purple pink black white brown grey gray golden silver dark light
big small large little tiny old young new beautiful pretty cute handsome nice cool happy sad
mann frau junge mädchen kind baby mensch person gesicht freund freundin mutter vater katze kater hund pferd vogel
hase tier auto haus baum blume stil bild foto zeichnung gemälde rot grün blau gelb schwarz weiß alt jung groß klein
der die das ein eine mein meine
"""
_ORDINARY = frozenset(_LISTED.split())
_CONSONANTS, _VOWELS = "bdfgkmnprtvz", "aeiou"


def is_ordinary(trigger: str) -> bool:
    """Return whether each of its words is one that any base draws already, `red cars` too; an empty one has none."""
    words = [*words_in(unicodedata.normalize("NFC", trigger).lower())]
    return bool(words) and all(
        word in _ORDINARY or word.removesuffix("s") in _ORDINARY for word in words
    )


def coined(draft_id: str, *, beside: str = "") -> str:
    """Return a rare word that can be spoken, the same for a draft each time, before the ordinary one it is for."""
    digest = sha256(draft_id.encode()).digest()
    syllables = (
        _CONSONANTS[digest[at] % len(_CONSONANTS)] + _VOWELS[digest[at + 1] % len(_VOWELS)]
        for at in (0, 2)
    )
    return f"{''.join(syllables)}x {beside}".strip()
