"""Sentences that relate people, end a story or change nothing, one written line each. Slots and rules: `templates.py`.

Sentences of a family `..._them` do not name what is counted: they may follow only where that is clear.
"""

from __future__ import annotations

# Somebody else's quantity follows from this one; the story goes on with that person.
COMPARISONS = {
    "more": """
        {B} <has> {n} more {o} than {A} </[does|did]>.
        {B} <has> {n} {o} more than {A} </[does|did]>.
        {A} <has> {n} fewer {o} than {B} </[does|did]>.
        {A} <has> {n} {o} fewer than {B} </[does|did]>.
        {B} <has> as many {o} as {A} <and/plus> {n} <more/extra ones/additional ones>.
        {P} <friend/cousin/classmate/neighbor> {B} <has> {n} more {o} than {he} [does|did].
        {B}, <a friend/a cousin/a classmate/a neighbor> of {A}, <has> {n} more {o} <than {A}/than {he} [does|did]>.
        Compared <with/to> {A}, {B} <has> {n} <more/extra> {o}.
        The {coll} of {B} [has|had] {n} more {o} than <the one of/that of> {A}.
        {B}'s {coll} [has|had] {n} more {o} than <{A}'s/{A}'s {coll}/that of {A}>.
        {B}'s {coll} [is|was] <larger/bigger> than <{A}'s/{A}'s {coll}/that of {A}> by {n} {o}.
        {A} <has> almost as many {o} as {B}, <only/just> {n} fewer.
        {A} [needs|needed] {n} more {o} to have as many </{o}> as {B} </[does|did]>.""",
    "fewer": """
        {B} <has> {n} fewer {o} than {A} </[does|did]>.
        {B} <has> {n} {o} fewer than {A} </[does|did]>.
        {A} <has> {n} more {o} than {B} </[does|did]>.
        {A} <has> {n} {o} more than {B} </[does|did]>.
        {B} [needs|needed] {n} more {o} to have as many </{o}> as {A} </[does|did]>.
        {A} <has> as many {o} as {B} <and/plus> {n} <more/extra ones/additional ones>.
        {P} <friend/cousin/classmate/neighbor> {B} <has> {n} fewer {o} than {he} [does|did].
        {B}, <a friend/a cousin/a classmate/a neighbor> of {A}, <has> {n} fewer {o} <than {A}/than {he} [does|did]>.
        Compared <with/to> {A}, {B} <has> {n} fewer {o}.
        The {coll} of {B} [has|had] {n} fewer {o} than <the one of/that of> {A}.
        {B}'s {coll} [has|had] {n} fewer {o} than <{A}'s/{A}'s {coll}/that of {A}>.
        {B}'s {coll} [is|was] smaller than <{A}'s/{A}'s {coll}/that of {A}> by {n} {o}.
        {B} <has> almost as many {o} as {A}, <only/just> {n} fewer.""",
    "times_other": """
        {B} <has> {n} times as many {o} as {A} </[does|did]>.
        {B} <has> {n} times the number of {o} that {A} <has>.
        For <each/every one> of the {o} <of {A}/that {A} [has|had]>, {B} <has> {n}.
        The {coll} of {B} [is|was] {n} times as <large/big> as <the one of/that of> {A}.
        {B}'s {coll} [is|was] {n} times as <large/big> as <{A}'s/{A}'s {coll}/that of {A}>.
        {P} <friend/cousin/classmate/neighbor> {B} <has> {n} times as many {o} as {he} [does|did].
        Compared <with/to> {A}, {B} <has> {n} times <as many/the number of> {o}.
        {B} <has> {o} <too/as well>: {n} times as many as {A} </[does|did]>.""",
    "twice_other": """
        {B} <has> twice as many {o} as {A} </[does|did]>.
        {B} <has> <double/twice> the number of {o} that {A} <has>.
        For <each/every one> of the {o} <of {A}/that {A} [has|had]>, {B} <has> two.
        The {coll} of {B} [is|was] twice as <large/big> as <the one of/that of> {A}.
        {P} <friend/cousin/classmate/neighbor> {B} <has> twice as many {o} as {he} [does|did].
        Compared <with/to> {A}, {B} <has> twice <as many/the number of> {o}.""",
    "part_other": """
        {A} <has> {n} times as many {o} as {B} </[does|did]>.
        {A} <has> {n} times the number of {o} that {B} <has>.
        For <every/each> {n} {o} <of {A}/that {A} [has|had]>, {B} <has> <one/only one/just one>.
        The {coll} of {A} [is|was] {n} times as <large/big> as <the one of/that of> {B}.
        {A}'s {coll} [is|was] {n} times as <large/big> as <{B}'s/{B}'s {coll}/that of {B}>.
        Compared <with/to> {B}, {A} <has> {n} times <as many/the number of> {o}.
        {B} <has> <only/just> one for <every/each> {n} {o} <of {A}/that {A} [has|had]>.
        {P} <friend/cousin/classmate/neighbor> {B} <has> <only/just> one for <every/each> {n} {o} of {A}.""",
    "half_other": """
        {B} <has> </only/just> half as many {o} as {A} </[does|did]>.
        {B} <has> <only/just> half the number of {o} that {A} <has>.
        {A} <has> twice as many {o} as {B} </[does|did]>.
        {A} <has> <double/twice> the number of {o} that {B} <has>.
        Compared <with/to> {A}, {B} <has> </only/just> half <as many/the number of> {o}.
        Compared <with/to> {B}, {A} <has> twice <as many/the number of> {o}.
        The {coll} of {B} [is|was] </only/just> half as <large/big> as <the one of/that of> {A}.
        {P} <friend/cousin/classmate/neighbor> {B} <has> </only/just> half as many {o} as {he} [does|did].""",
}

# Last moves, and the questions.
ENDINGS = {
    "share": """
        {S} <[shares|shared]/[divides|divided]/[splits|split]> <all> <evenly> <among/between> {n} {gs}.
        {S} <gives> <all> to {n} {gs}, <the same number to each/equally many to each/each getting the same number>.
        In the end, {n} {gs} <[divide|divided]/[share|shared]/[split|split]> all <of/> the {o} <evenly>.
        {S} [lets|let] {n} {gs} <split/share/divide> <all> <evenly>.
        All <of/> <the/{P}> {o} [are|were] <divided/shared/split> <evenly> <among/between> {n} {gs}.
        {n} {gs} [get|got] all <of/> <the/{P}> {o}, and each of them <gets> the same number.""",
    "share_them": """
        {S} <[shares|shared]/[divides|divided]/[splits|split]> them <evenly> <among/between> {n} {gs}.
        {S} <gives> <them> to {n} {gs}, <the same number to each/equally many to each>.
        {n} {gs} <[divide|divided]/[share|shared]/[split|split]> <them> <evenly>.""",
    "question_share": """
        How many {o} <[does|did]/will> <each/every/one> {g} <get/receive>?
        How many {o} <[does|did]/will> <each of them/each one of them> <get/receive>?
        How many {o} [are|were] there for <each/every/one> {g}?
        What is the number of {o} <for/that [go|went] to> <each/every/one> {g}?
        What number of {o} [does|did] <each/every/one> {g} <get/receive>?
        Find <how many/the number of> {o} <each/every/one> {g} <gets>.
        Tell me <how many/the number of> {o} <each/every/one> {g} <gets>.""",
    "store": """
        {S} <[puts|put]/[packs|packed]/[places|placed]> <all> into {n} {cs}, <the same number/equally many> in each.
        {S} <[packs|packed]/[divides|divided]/[puts|put]> <all> <equally/evenly> into {n} {cs}.
        All <of/> <the/{P}> {o} [are|were] <placed in/packed into> {n} {cs}, equally many in each </{c}>.
        {S} [divides|divided] <all> <equally/evenly> <among/between> {n} {cs}.
        Into each of {n} {cs}, {S} <[packs|packed]/[puts|put]> the same number of {o}, until all [are|were] placed.
        {S} [fills|filled] {n} {cs} with <all>, <the same number/equally many> in each </{c}>.""",
    "question_store": """
        How many {o} [are|were] <there/> in <each/every/one> {c}?
        What is the number of {o} <in/inside> <each/every/one> {c}?
        How many {o} [does|did] <each/every/one> {c} <hold/contain/have>?
        What number of {o} [are|were] <there/> in <each/every/one> {c}?
        Find <how many/the number of> {o} <each/every/one> {c} <[contains|contained]/[holds|held]>.
        How many {o} [does|did] {A} <put/have> in <each/every> {c}?""",
    "question": """
        How many {o} does {A} have <now/left/left now/at this point/by now>?
        How many {o} does {he} have <now/left/left now/at this point/by now>?
        How many {o} [does|did] <{A}/{he}> <have/own> <end>?
        What is the <total/> number of {o} <that/> {A} [has|had] <end>?
        Find <the number of/how many> {o} <that/> {A} [has|had] <end>.
        <Now/So/Then>, how many {o} does {A} have </left>?
        <Can you tell/Do you know> <how many/the number of> {o} <{A}/{he}> has <now/left>?
        So how many {o} [does|did] <{A}/{he}> end up with?
        How many {o} [are|were] there with {A} <end>?
        <In the end/At the end/After all this>, how many {o} [does|did] <{A}/{he}> <have/own>?
        What number of {o} does <{A}/{he}> have <now/left/by now>?
        How many {o} [are|were] left <for/with> {A} <end>?
        With how many {o} [does|did] {A} <end up/go home>?""",
    "question_them": """
        How many does <{A}/{he}> have <now/left/left now/by now>?
        How many [does|did] <{A}/{he}> <have/own> <end>?
        <Now/So/Then>, how many does <{A}/{he}> have </left>?
        <In the end/At the end/After all this>, how many [does|did] <{A}/{he}> <have/own>?
        How many [are|were] left <end>?""",
    "money_question": """
        How much money does <{A}/{he}> have <now/left/left now/at this point>?
        How much money [does|did] <{A}/{he}> have <end>?
        How much [does|did] <{A}/{he}> have <end>?
        How much does <{A}/{he}> have <now/left/left now>?
        Find how much money <{A}/{he}> [has|had] <end>.
        <Can you tell/Do you know> how much money <{A}/{he}> has <now/left>?
        <In the end/At the end/After all this>, how much money [does|did] <{A}/{he}> have?""",
    "question_together": """
        How many {o} [do|did] {A} and {B} <have/own> <together/in total/in all/altogether>?
        What is the <total/> number of {o} <of {A} and {B}/that {A} and {B} [have|had]> </together>?
        {A} and {B} [put|put] <all/> their {o} together. How many [are|were] there <in all/in total/now>?
        {A} and {B} [put|put] <all/> their {o} together. What is the <total/> number of {o}?
        How many {o} [do|did] <the two of them/both of them/they both> have <in total/together/in all>?
        Find the <total/> number of {o} <that/> {A} and {B} <[own|owned]/[have|had]> <together/in all/in total>.
        <Together/In total/In all>, how many {o} [do|did] {A} and {B} <have/own>?""",
}

# Sentences that change nothing.
ASIDES = {
    "distractor": """
        <{B}/The house of {A}/{B}'s house/The school of {A}> [is|was] {n} years old.
        The <school/market/shop/park> [is|was] {n} <miles/minutes> away </from the house/from home>.
        The way <to/home from> the <shop/market/school/park> [takes|took] {n} minutes.
        <{A}/{B}> [has|had] {n} <cousins/classmates/neighbors>.
        It [is|was] {n} degrees <outside/{place}/in the morning>.
        {B} <has> {n} {x} </at home/in a {c}>.
        {A} also [sees|saw] {n} {x} <{place}/>.
        There [are|were] </also> {n} <students/children> at school with <{A}/{B}>.
        {B} [buys|bought] {item} <for {n} dollars/that [costs|cost] {n} dollars>.
        There [are|were] also {n} {x} {place}.""",
    "filler": """
        It [is|was] <a sunny/a nice/a rainy/a cold/a warm> day.
        <{B}/{P} {rel}> [is|was] <at home/at work/at school/in the garden>.
        {A} <[likes|liked]/[loves|loved]> to <count/collect> things.
        The <others/neighbors/children> [are|were] <at school/at home/in the park>.
        {A} [is|was] </very> <happy/glad> </about it/about that>.
        {B} [helps|helped] with the work </at home/in the garden>.
        {A} and {B} [are|were] <old/good/best> friends.
        The <day/afternoon/week> [is|was] almost over.
        {A} <[likes|liked]/[loves|loved]> the <work/park/school> </very much>.
        It [is|was] almost the end of the <day/week/afternoon>.""",
}
