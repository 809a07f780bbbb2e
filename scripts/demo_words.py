"""The words of the demo: shared by the pretraining text and by the task, which otherwise have
nothing in common.

A word stands in one list only, so that a noun kept for the held-out rows cannot come back as a
verb.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

NAMES = _words(
    "Mia Tom Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nora Oscar Paul Rosa Sam"
    " Tina Victor Wendy Alan Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin Laura Marcus Nina Olga"
    " Peter Ruth Simon Tara Walter Zoe Adam Beth Chris Dora Ella Frank Hugo Irene Jonas Karen Lucy Martin"
    " Paula Robert Susan Thomas"
)

CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Cairo Tokyo Delhi Sydney Boston"
    " Chicago Denver Dallas Seattle Toronto Lima Bogota Geneva Milan Munich Hamburg Krakow Riga Helsinki"
    " Zurich Porto Seville Naples Lyon Bergen Kyoto Seoul Manila Jakarta Warsaw Brussels Glasgow Nairobi"
    " Havana Montreal Turin Bristol"
)

_CHORES = {
    "call visit pay": (
        "dentist doctor plumber teacher landlord gardener baker lawyer neighbour painter tailor"
    ),
    "visit find check close": "bank library office museum bakery garage school theatre market",
    "clean paint repair measure": (
        "house kitchen garden window door table chair roof fence wall floor sink oven fridge tent"
    ),
    "fix sell check move charge": (
        "car bike boat lamp clock laptop printer camera radio piano guitar kettle scooter drone"
    ),
    "pay print sign send": (
        "bill rent tax report form contract ticket letter parcel envelope passport invoice"
    ),
    "feed wash find brush": "cat dog bird fish horse rabbit pony parrot",
    "water plant cut order": "flowers roses trees grass tomatoes bushes tulips hedge",
    "wash pack return collect": (
        "shirt coat shoes jacket dress suitcase blanket gloves helmet basket carpet curtains cushions"
    ),
    "buy order bring carry": (
        "bread milk cake soup coffee apples oranges eggs cheese medicine pills candles batteries wood"
    ),
}
VERBS_OF: dict[str, tuple[str, ...]] = {
    noun: _words(verbs) for verbs, nouns in _CHORES.items() for noun in _words(nouns)
}
"""What one does with a thing."""

NOUNS = tuple(VERBS_OF)
VERBS = tuple(sorted({verb for verbs in VERBS_OF.values() for verb in verbs}))

ADJECTIVES = _words(
    "red blue green old new small big long short warm cold quiet loud bright dark happy lonely broken golden"
    " silver sweet bitter wild gentle heavy light fast slow hidden lost winter summer purple velvet crystal"
    " iron distant"
)

SONG_NOUNS = _words(
    "river moon rain fire sky road heart dream city ocean star shadow storm wind train bridge island mountain"
    " forest mirror night angel dancer stranger thunder sunrise harbour"
)

_UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen"
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty")

LITTLE_WORDS = _words(
    "a about add alarm an and ask be can count day do does down evening for forecast forget from give half"
    " hear her his how i in intent is it know let like look make message midnight minutes morning my name"
    " need noon afternoon not number of off on over past phone play please put quarter remind seconds"
    " reminder set should show song start stop sure talk tell text that the their they time timer to today"
    " tomorrow track up wake want weather what when who will with word you"
)


def number_word(n: int) -> str:
    """`n` from 0 to 59 in words, as `twenty five`."""
    if n < len(_UNITS):
        return _UNITS[n]
    tens, units = divmod(n, 10)
    return _TENS[tens] + (f" {_UNITS[units]}" if units else "")


ALL_WORDS = tuple(
    sorted(
        {*DAYS, *NAMES, *CITIES, *VERBS, *NOUNS, *ADJECTIVES, *SONG_NOUNS, *LITTLE_WORDS, *_UNITS, *_TENS[2:]}
    )
)
