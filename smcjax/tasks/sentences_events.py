"""Sentences that open a story or change what one person has: family -> (for training, held out), one a line.

Slots and rules: `templates.py`.
"""

from __future__ import annotations

OPENINGS = {
    "open": (
        """{A} [has|had] {n} {o}.
        {A} [starts|started] with {n} {o}.
        At first, {A} [has|had] {n} {o}.
        {A} [owns|owned] a collection of {n} {o}.
        {A} [keeps|kept] {n} {o} in a {c}.
        {A} [picks|picked] up {n} {o} {place}.
        {A} [buys|bought] {n} {o} at the shop.
        There [are|were] {n} {o} in the {c} that {A} [owns|owned].
        {A} [gets|got] {n} {o} from {his} {rel} to start with.
        {A} [counts|counted] the {o} at home: there [are|were] {n} of them.
        In the beginning, there [are|were] {n} {o} in the {c} of {A}.
        {A} [brings|brought] a {c} with {n} {o} to school.
        {A} [is|was] proud of having {n} {o}.
        A {c} of {n} {o} [belongs|belonged] to {A}.""",
        """In the beginning, {A} [owns|owned] {n} {o}.
        {A} [has|had] a {c} with {n} {o} in it.
        There [are|were] {n} {o} in a collection that [belongs|belonged] to {A}.
        {A} [counts|counted] {n} {o} at home.
        At first there [are|were] {n} {o} in the {c} of {A}.""",
    ),
    "open_groups": (
        """{A} [has|had] {n} {cs} with {m} {o} in each.
        There [are|were] {n} {cs} at home, and {A} [keeps|kept] {m} {o} in each {c}.
        {A} [buys|bought] {n} {cs} of {o}. Every {c} [has|had] {m} {o} in it.
        Each of the {n} {cs} that {A} [owns|owned] [contains|contained] {m} {o}.
        {A} [fills|filled] {n} {cs} with {m} {o} each.
        {A} [starts|started] with {n} {cs}, and every one of them [holds|held] {m} {o}.
        A {c} [holds|held] {m} {o}, and {A} [has|had] {n} such {cs}.""",
        """{A} [owns|owned] {n} {cs}, and there [are|were] {m} {o} in every {c}.
        Each {c} [contains|contained] {m} {o}, and {A} [starts|started] with {n} of such {cs}.
        {A} [brings|brought] {n} {cs} to school, and each of them [holds|held] {m} {o}.""",
    ),
    "open_two": (
        """{A} [has|had] {n} {adj} {o} and {m} {adk} {o}.
        {A} [has|had] {n} {o} at home and {m} more {o} at school.
        {A} [picks|picked] up {n} {o} in the morning and {m} {o} in the afternoon.
        {A} [owns|owned] {n} {adj} {o} as well as {m} {adk} {o}.
        In the {c} of {A} there [are|were] {n} {adj} {o}. There [are|were] also {m} {adk} ones.
        {A} [keeps|kept] {n} {o} in one {c} and {m} {o} in another.
        On Monday {A} [collects|collected] {n} {o}, and on Friday {m} more.""",
        """There [are|were] {n} {adj} {o} and also {m} {adk} {o} in a {c} that [belongs|belonged] to {A}.
        {A} [collects|collected] {n} {o} in the morning and another {m} on the way home.
        In one {c} {A} [has|had] {n} {o}, and in another {m} more.""",
    ),
    "money_open": (
        """{A} [has|had] {n} dollars.
        {A} [starts|started] with {n} dollars.
        There [are|were] {n} dollars in the wallet that {A} [owns|owned].
        {A} [keeps|kept] {n} dollars in a jar.
        At first, {A} [has|had] {n} dollars of savings.
        {A} [earns|earned] {n} dollars for {job}.
        The savings of {A} [are|were] {n} dollars.
        {A} [gets|got] {n} dollars from {his} {rel}.""",
        """In the beginning, {A} [has|had] {n} dollars.
        {A} [has|had] a wallet with {n} dollars in it.
        {A} [starts|started] with savings of {n} dollars.""",
    ),
    "money_open_groups": (
        """{A} [saves|saved] {m} dollars a week for {n} weeks.
        {A} [works|worked] for {n} hours and [earns|earned] {m} dollars an hour.
        For {n} days, {A} [earns|earned] {m} dollars every day.
        {A} [has|had] {n} jars with {m} dollars in each.
        Every week {A} [puts|put] {m} dollars into a jar, for {n} weeks.""",
        """{A} [earns|earned] {m} dollars an hour and [works|worked] for {n} hours.
        For {n} weeks, {A} [puts|put] {m} dollars a week into a jar.""",
    ),
}

# The quantity of one person changes.
CHANGES = {
    "gain": (
        """{S} [finds|found] {n} more {o} {place}.
        {B} [gives|gave] {O} {n} {o}.
        {S} [buys|bought] another {n} {o}.
        {S} [gets|got] {n} {o} from {B}.
        {S} [receives|received] {n} extra {o} as a gift.
        {n} more {o} [are|were] added to the ones {S} already [has|had].
        {P} {rel} [brings|brought] {O} {n} new {o}.
        {S} [picks|picked] up {n} {o} that [are|were] lying on the ground.
        {S} [wins|won] {n} {o} in a game.
        At the shop, {S} [pays|paid] for {n} more {o} and [takes|took] them home.
        {S} [adds|added] {n} {o} to {his} collection.
        {B} [has|had] {n} {o} to spare and [lets|let] {O} have all of them.
        A {c} with {n} more {o} [arrives|arrived] for {O}.
        {S} [collects|collected] {n} more {o}.
        {S} [trades|traded] an old toy for {n} {o}.
        Thanks to {B}, {S} [has|had] {n} more {o} than before.
        {P} collection [grows|grew] by {n} {o}.
        {S} [is|was] given {n} {o} by {B}.
        {S} [borrows|borrowed] {n} {o} from {B}.
        {S} [is|was] lucky: {he} [finds|found] {n} {o} in an old {c}.
        {B} [sends|sent] a gift of {n} {o}, and {S} [keeps|kept] them all.
        Because {S} [helps|helped] {B}, {he} [receives|received] {n} {o}.
        {B} [hands|handed] another {n} {o} to {O}.""",
        """{B} [brings|brought] {n} more {o} and [gives|gave] all of them to {O}.
        As a gift, {S} [gets|got] another {n} {o} from {B}.
        {S} [is|was] lucky and [wins|won] another {n} {o}.
        {P} collection [grows|grew] because {B} [adds|added] {n} {o} to it.
        {S} [buys|bought] {n} new {o} at the market and [adds|added] them to the others.
        {S} [helps|helped] {B} and [is|was] given {n} extra {o}.
        {B} [lets|let] {O} have {n} more {o}.""",
    ),
    "lose": (
        """{S} [loses|lost] {n} {o} {place}.
        {S} [gives|gave] {n} {o} to {B}.
        {S} [gives|gave] away {n} of {his} {o}.
        {S} [uses|used] up {n} {o}.
        {S} [sells|sold] {n} of the {o} to {B}.
        {B} [takes|took] {n} of the {o} away.
        {n} of the {o} [are|were] damaged and [have|had] to be thrown away.
        {S} [hands|handed] {n} {o} over to {B}.
        {S} [returns|returned] {n} {o} to the shop.
        {S} [drops|dropped] {n} {o} and never [finds|found] them again.
        {n} of the {o} [go|went] missing.
        {S} [donates|donated] {n} {o} to the school.
        {B} [asks|asked] for {n} {o}, and {S} [agrees|agreed] to give them away.
        {S} [lends|lent] {n} {o} to {B}.
        {P} collection [shrinks|shrank] by {n} {o}.
        {S} [leaves|left] {n} {o} at the house of {B} for good.
        {S} no longer [needs|needed] {n} of the {o} and [gives|gave] them to the others at school.
        {B} [borrows|borrowed] {n} {o} from {O}.
        Because {B} [needs|needed] some {o}, {S} [lets|let] {B} have {n} of them.
        {S} [sends|sent] {n} {o} to {his} {rel}.
        Sadly, {n} of {P} {o} [are|were] lost.
        {S} [throws|threw] out {n} old {o}.
        {S} [brings|brought] {n} of the {o} back to {B}.
        {n} of the {o} [are|were] taken by {B}.""",
        """{S} [sells|sold] {n} of {his} {o} at the market.
        {B} [asks|asked] for some {o}, so {S} [hands|handed] over {n} of them.
        {n} of the {o} [are|were] lost {place}.
        {S} [throws|threw] away {n} {o} that [are|were] damaged.
        {S} [sends|sent] {n} of the {o} back to the shop.
        {S} [agrees|agreed] to give {n} {o} to {his} {rel}.
        Sadly, {B} [loses|lost] {n} of {P} {o}.""",
    ),
    "times": (
        """{P} number of {o} [grows|grew] to {n} times as many.
        {S} [works|worked] hard and [multiplies|multiplied] the number of {o} by {n}.
        {S} [collects|collected] more until {he} [has|had] {n} times as many {o}.
        {S} now [has|had] {n} times as many {o} as before.
        The number of {o} {S} [owns|owned] [becomes|became] {n} times as large.
        {B} [promises|promised] to multiply the number of {o} by {n} and [does|did] so.
        Each of {P} {o} [is|was] traded for {n} smaller ones.
        {S} [swaps|swapped] every one of the {o} for {n} new {o}.
        Thanks to {his} {rel}, {S} soon [owns|owned] {n} times the number of {o}.
        {P} collection [becomes|became] {n} times as large as it [is|was] before.
        After a visit to {B}, the number of {o} [is|was] {n} times what it [was|had been].""",
        """{S} [has|had] {n} times as many {o} after a visit to {B}.
        The number of {P} {o} [is|was] multiplied by {n}.
        {S} [trades|traded] each of the {o} for {n} new ones.
        {B} [helps|helped], and {P} collection [grows|grew] until it [is|was] {n} times as large.""",
    ),
    "double": (
        """{S} [doubles|doubled] the number of {o}.
        The number of {o} [doubles|doubled].
        {S} now [has|had] twice as many {o} as before.
        {P} collection [becomes|became] twice as large.""",
        """{P} number of {o} [grows|grew] to twice as many.
        {B} [helps|helped], and the number of {o} [is|was] doubled.""",
    ),
    "triple": (
        """{S} [triples|tripled] the number of {o}.
        The number of {o} [triples|tripled].""",
        """{P} collection of {o} [triples|tripled] thanks to {B}.""",
    ),
    "part": (
        """{S} [splits|split] the {o} evenly into {n} {cs} and [keeps|kept] only one {c}.
        {S} [puts|put] the {o} into {n} equal piles and [gives|gave] away all piles but one.
        {S} [keeps|kept] only one out of every {n} {o}.
        {S} and some friends, {n} people in all, [share|shared] the {o} equally.
        The {o} [are|were] divided equally among {n} {gs}, and {S} [is|was] one of them.
        {S} [packs|packed] the {o} into {n} {cs}, the same number in each, and [takes|took] a single {c} home.
        {S} [divides|divided] the {o} into {n} equal parts and [holds|held] on to one part.
        {S} [makes|made] {n} equal piles of {o} and [loses|lost] all but one pile.
        Out of every {n} {o}, {S} [keeps|kept] one and [sells|sold] the rest.
        {B} [divides|divided] the {o} fairly among {n} people, so {S} [gets|got] one of {n} equal parts.""",
        """{S} [divides|divided] the {o} evenly into {n} piles and [keeps|kept] a single pile.
        {S} [makes|made] {n} equal parts of the {o} and [takes|took] only one part home.
        The {o} [are|were] shared equally by {n} people, and {S} [is|was] one of them.
        {B} [packs|packed] the {o} evenly into {n} {cs}, and {S} [gets|got] only one of them.""",
    ),
    "half": (
        """{S} [gives|gave] half of the {o} to {B}.
        {S} [loses|lost] half of {his} {o}.
        {S} [keeps|kept] only half of the {o}.
        {B} [takes|took] half of the {o}.
        Half of the {o} [are|were] sold.""",
        """Half of {P} {o} [go|went] to {B}.
        {S} [sells|sold] half of the {o} at the market.""",
    ),
    "third": (
        """{S} [keeps|kept] only a third of the {o}.
        {S} [gives|gave] away the {o}, but [holds|held] on to a third of them.""",
        """{S} [sells|sold] the {o}, but [keeps|kept] a third of them.""",
    ),
    "money_gain": (
        """{S} [earns|earned] {n} dollars for {job}.
        {B} [pays|paid] {O} {n} dollars.
        {P} {rel} [gives|gave] {O} {n} dollars.
        {S} [finds|found] {n} dollars in an old bag.
        {S} [gets|got] {n} dollars as a gift.
        {S} [saves|saved] another {n} dollars.
        {S} [receives|received] {n} dollars for {job}.
        {B} [returns|returned] {n} dollars that {he} [lent|had lent] before.
        {S} [sells|sold] {item} for {n} dollars.
        {S} [wins|won] {n} dollars in a game.
        {S} [is|was] given {n} more dollars by {B}.""",
        """{S} [receives|received] {n} dollars from {B}.
        For {job}, {S} [is|was] paid {n} dollars.
        {B} [buys|bought] {item} from {O} for {n} dollars.
        As a gift, {P} {rel} [sends|sent] {O} {n} dollars.""",
    ),
    "money_lose": (
        """{S} [spends|spent] {n} dollars on {item}.
        {S} [buys|bought] {item} for {n} dollars.
        {S} [pays|paid] {n} dollars for {item}.
        {S} [loses|lost] {n} dollars {place}.
        {S} [gives|gave] {n} dollars to {B}.
        {S} [sees|saw] {item} that [costs|cost] {n} dollars and [buys|bought] it.
        {S} [lends|lent] {n} dollars to {B}.
        {S} [donates|donated] {n} dollars to the school.
        The price of {item} [is|was] {n} dollars, and {S} [pays|paid] it.
        {B} [asks|asked] for {n} dollars, and {S} [hands|handed] them over.
        {B} [takes|took] {n} dollars from {O}.
        {S} [sends|sent] {n} dollars to {his} {rel}.""",
        """{S} [hands|handed] over {n} dollars for {item}.
        {S} [asks|asked] for {item} and [spends|spent] {n} dollars on it.
        {P} {rel} [borrows|borrowed] {n} dollars from {O}.
        {B} [sells|sold] {O} {item} for {n} dollars.""",
    ),
    "money_times": (
        """{S} [saves|saved] until {he} [has|had] {n} times as much money.
        {P} savings [grow|grew] to {n} times as much.
        {S} now [has|had] {n} times as much money as before.
        {S} [works|worked] hard and [multiplies|multiplied] {his} money by {n}.
        With some luck, the money [becomes|became] {n} times as much.""",
        """{P} money [grows|grew] to {n} times as much.
        {S} [works|worked] until {his} savings [are|were] {n} times as large.""",
    ),
    "money_double": (
        """{S} [doubles|doubled] {his} money.
        {P} savings [double|doubled].
        {S} now [has|had] twice as much money as before.""",
        """{P} savings [grow|grew] to twice as much.
        {S} [works|worked] hard until {his} money [is|was] doubled.""",
    ),
    "money_part": (
        """{S} [splits|split] the money equally with some friends, {n} people in all.
        {S} [keeps|kept] one of {n} equal parts of the money and [gives|gave] the rest away.
        The money [is|was] divided equally among {n} {gs}, and {S} [is|was] one of them.
        {S} [puts|put] the money into {n} equal piles and [spends|spent] all piles but one.
        {S} [keeps|kept] only one out of every {n} dollars.""",
        """{S} [divides|divided] the money into {n} equal parts and [keeps|kept] only one part.
        {n} people, {S} and some friends, [share|shared] the money equally.""",
    ),
    "money_half": (
        """{S} [spends|spent] half of the money on {item}.
        {S} [gives|gave] half of {his} money to {B}.
        {S} [loses|lost] half of the money.
        {S} [keeps|kept] only half of the money.""",
        """Half of {P} money [is|was] spent on {item}.
        {B} [takes|took] half of the money.""",
    ),
    "sell": (
        """{S} [sells|sold] all of the {o} for {n} dollars each.
        {S} [sells|sold] every one of the {o} at a price of {n} dollars.
        {B} [buys|bought] all of {P} {o} and [pays|paid] {n} dollars for each.
        Each of the {o} [brings|brought] in {n} dollars when {S} [sells|sold] them all.
        At the market, {S} [gets|got] {n} dollars for each of {his} {o} and [sells|sold] them all.""",
        """{B} [pays|paid] {O} {n} dollars for every one of the {o} and [takes|took] them all.
        {S} [sells|sold] all of the {o}, and each [brings|brought] in {n} dollars.
        All of the {o} [are|were] sold at a price of {n} dollars each.""",
    ),
}
