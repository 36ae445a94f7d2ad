"""Sentences that relate people, end a story or change nothing: family -> (for training, held out), one a line.

Slots and rules: `templates.py`.
"""

from __future__ import annotations

# Somebody else's quantity follows from this one; the story goes on with that person.
COMPARISONS = {
    "more": (
        """{B} [has|had] {n} more {o} than {A}.
        {B} [owns|owned] {n} {o} more than {A} [does|did].
        {A} [has|had] {n} fewer {o} than {B}.
        {B} [has|had] as many {o} as {A} and {n} extra ones.
        {P} friend {B} [has|had] {n} more {o} than {he} [does|did].
        Compared with {A}, {B} [has|had] {n} more {o}.""",
        """{B} [owns|owned] as many {o} as {A} and {n} more.
        The collection of {B} [has|had] {n} more {o} than the one of {A}.
        {A} [owns|owned] {n} {o} fewer than {B} [does|did].""",
    ),
    "fewer": (
        """{B} [has|had] {n} fewer {o} than {A}.
        {B} [owns|owned] {n} {o} fewer than {A} [does|did].
        {A} [has|had] {n} more {o} than {B}.
        {B} [needs|needed] {n} more {o} to have as many as {A}.
        {P} friend {B} [has|had] {n} fewer {o} than {he} [does|did].
        Compared with {A}, {B} [has|had] {n} fewer {o}.
        The collection of {B} [is|was] smaller than the one of {A} by {n} {o}.""",
        """{A} [owns|owned] {n} {o} more than {B} [does|did].
        The collection of {B} [has|had] {n} fewer {o} than the one of {A}.
        {B} [has|had] almost as many {o} as {A}, only {n} fewer.""",
    ),
    "times_other": (
        """{B} [has|had] {n} times as many {o} as {A}.
        {B} [owns|owned] {n} times the number of {o} that {A} [has|had].
        For every one of the {o} of {A}, {B} [has|had] {n}.
        The collection of {B} [is|was] {n} times as large as the one of {A}.
        {P} friend {B} [has|had] {n} times as many {o} as {he} [does|did].""",
        """Compared with {A}, {B} [has|had] {n} times as many {o}.
        For each of the {o} that {A} [has|had], {B} [owns|owned] {n}.""",
    ),
    "twice_other": (
        """{B} [has|had] twice as many {o} as {A}.
        {B} [owns|owned] double the number of {o} that {A} [has|had].
        For every one of the {o} of {A}, {B} [has|had] two.""",
        """{B} [owns|owned] twice the number of {o} that {A} [has|had].
        Compared with {A}, {B} [has|had] twice as many {o}.""",
    ),
    "part_other": (
        """{A} [has|had] {n} times as many {o} as {B}.
        {A} [owns|owned] {n} times the number of {o} that {B} [has|had].
        For every {n} {o} of {A}, {B} [has|had] one.
        The collection of {A} [is|was] {n} times as large as the one of {B}.""",
        """Compared with {B}, {A} [has|had] {n} times as many {o}.
        {B} [has|had] only one for every {n} {o} of {A}.""",
    ),
    "half_other": (
        """{B} [has|had] half as many {o} as {A}.
        {B} [owns|owned] only half the number of {o} that {A} [has|had].
        {A} [has|had] twice as many {o} as {B}.""",
        """Compared with {A}, {B} [has|had] only half as many {o}.
        {A} [owns|owned] double the number of {o} that {B} [has|had].""",
    ),
}

# Last moves, and the questions.
ENDINGS = {
    "share": (
        """{S} [shares|shared] all the {o} equally among {n} {gs}.
        {S} [gives|gave] all the {o} to {n} {gs}, the same number to each.
        In the end, {n} {gs} [divide|divided] all the {o} evenly.
        {S} [lets|let] {n} {gs} split all the {o} equally.""",
        """All the {o} [are|were] divided fairly among {n} {gs}.
        {n} {gs} [get|got] all the {o}, and each of them [receives|received] the same number.""",
    ),
    "question_share": (
        """How many {o} [does|did] each {g} get?
        What is the number of {o} for every {g}?
        How many {o} [does|did] each {g} receive?
        Find how many {o} one {g} [receives|received].""",
        """How many {o} [does|did] every {g} get?
        What number of {o} [does|did] one {g} get?""",
    ),
    "store": (
        """{S} [puts|put] all the {o} into {n} {cs}, the same number in each.
        {S} [packs|packed] all the {o} evenly into {n} {cs}.
        All the {o} [are|were] placed in {n} {cs}, equally many in each {c}.""",
        """{S} [divides|divided] all the {o} evenly among {n} {cs}.
        Into each of {n} {cs}, {S} [packs|packed] the same number of {o}, until all [are|were] placed.""",
    ),
    "question_store": (
        """How many {o} [are|were] in each {c}?
        What is the number of {o} in one {c}?
        How many {o} [does|did] each {c} hold?""",
        """What number of {o} [are|were] there in each {c}?
        Find how many {o} every {c} [contains|contained].""",
    ),
    "question": (
        """How many {o} does {A} have now?
        How many {o} [does|did] {A} have in the end?
        What is the number of {o} that {A} [has|had] at the end?
        Find the number of {o} {A} [has|had] in the end.
        Now, how many {o} does {A} have?
        Can you tell how many {o} {A} has now?
        So how many {o} [does|did] {A} end up with?
        How many {o} [are|were] there with {A} at the end?""",
        """In the end, how many {o} [does|did] {A} have?
        What number of {o} does {A} have now?
        Find how many {o} {A} [has|had] at the end.
        Can you tell the number of {o} {A} [has|had] in the end?""",
    ),
    "question_together": (
        """How many {o} [do|did] {A} and {B} have together?
        What is the total number of {o} of {A} and {B}?
        {A} and {B} [put|put] all their {o} together. How many [are|were] there in all?
        How many {o} [do|did] the two of them have in total?
        Find the number of {o} {A} and {B} [own|owned] together.""",
        """Together, how many {o} [do|did] {A} and {B} have?
        {A} and {B} [put|put] their {o} together. What is the total number of {o}?""",
    ),
}

# Sentences that change nothing.
ASIDES = {
    "distractor": (
        """{B} [is|was] {n} years old.
        The school [is|was] {n} miles away from the house.
        The way to the shop [takes|took] {n} minutes.
        {A} [has|had] {n} cousins.
        It [is|was] {n} degrees outside.
        {B} [has|had] {n} {x}.
        {A} also [sees|saw] {n} {x} {place}.
        There [are|were] {n} students at school with {A}.
        {B} [buys|bought] {item} for {n} dollars.""",
        """The {rel} of {A} [is|was] {n} years old.
        {B} [owns|owned] {n} {x}.
        The market [is|was] {n} minutes away.
        There [are|were] also {n} {x} {place}.""",
    ),
    "filler": (
        """It [is|was] a sunny day.
        {B} [is|was] at home.
        {A} [likes|liked] to count things.
        The others [are|were] at school.
        {A} [is|was] very happy about it.
        {B} [helps|helped] with the work.
        {A} and {B} [are|were] old friends.
        The day [is|was] almost over.""",
        """{B} [is|was] very happy.
        {A} [likes|liked] the work.
        It [is|was] almost the end of the day.""",
    ),
}
