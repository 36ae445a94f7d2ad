"""Sentences that change what one person has, one written line each. Slots, choices and rules: `templates.py`.

Sentences of a family `..._them` do not name what is counted: they may follow only where that is clear.
"""

from __future__ import annotations

CHANGES = {
    "gain": """
        {S} [finds|found] <new> <{place}/>.
        {S} <[picks|picked] up/[collects|collected]/[gathers|gathered]> <new> <{place}/>.
        {B} <gives> {O} <new> </as a gift/as a present>.
        {B} <gives> <new> to {O}.
        {P} {rel} <gives> <new> to {O}.
        {S} [buys|bought] <new> </at the shop/at the market/in town/from {B}>.
        {S} <gets> <new> from <someone>.
        {S} <gets> <new> as a <gift/present> </from {B}>.
        <new> [are|were] added to <the ones/those> {S} already [has|had].
        <more> [are|were] added to {P} collection.
        {P} {rel} <[brings|brought]/[sends|sent]/[buys|bought]/<gives>> {O} <new>.
        {S} [picks|picked] up {n} {o} that [are|were] lying <on the ground/{place}>.
        {S} [wins|won] <new> in a <game/contest>.
        At the <shop/market>, {S} <[buys|bought]/[pays|paid] for> <more> and [takes|took] them home.
        {S} [adds|added] <new> to <{his}/the> collection.
        {S} [buys|bought] <new> and [adds|added] them to the <others/collection>.
        {B} [has|had] {n} {o} to spare and <[lets|let] {O} have <them>/[gives|gave] {O} all of them>.
        A <{c}/package> with <new> [arrives|arrived] for {O}.
        {S} [trades|traded] <an old toy/an old game/{item}> for <new>.
        Thanks to <{B}/{his} {rel}>, {S} <has> <{n} more {o} than before/{n} more {o}/{n} extra {o}>.
        {P} <collection/collection of {o}/number of {o}> <[grows|grew]/[increases|increased]> by {n}.
        {P} collection <[grows|grew]/[increases|increased]> by {n} {o} </thanks to {B}>.
        {S} [is|was] <given/handed/sent> <new> by <someone>.
        {S} [borrows|borrowed] <new> from <someone>.
        {S} [is|was] lucky <and [finds|found]/and [wins|won]> <new>.
        {S} [is|was] lucky: {he} [finds|found] <new> in an old {c}.
        {B} [sends|sent] <a gift of {n} {o}/<new>>, and {S} [keeps|kept] <them>.
        Because {S} [helps|helped] {B}, {he} <gets> <new>.
        {S} [helps|helped] <{B}/{his} {rel}> and [is|was] given <new>.
        {B} [brings|brought] <new> and [gives|gave] <them> to {O}.
        {P} collection [grows|grew] because {B} [adds|added] <new> to it.
        <{B}/{P} {rel}> [lets|let] {O} have <new>.""",
    "gain_them": """
        {S} <[finds|found]/[picks|picked] up/[collects|collected]> <another> <{place}/>.
        {S} <gets> <another> from <someone>.
        {S} <gets> <another> as a <gift/present>.
        {S} [buys|bought] <another> </at the shop/at the market/from {B}>.
        {B} <gives> {O} <another> </as a gift/as a present>.
        {P} {rel} <[brings|brought]/[sends|sent]/<gives>> {O} <another>.
        {S} [wins|won] <another> in a <game/contest>.
        {S} [is|was] <given/handed/sent> <another> by <someone>.""",
    "lose": """
        {S} [loses|lost] <of> <{place}/>.
        {S} <gives> <of> to <someone>.
        {S} <gives> <someone> <of>.
        {S} [gives|gave] away <of>.
        {S} {uses} <of> </at home/{place}>.
        <{B}/{P} {rel}> {uses} {n} of <the/{P}> {o}.
        {S} [sells|sold] <of> </to {B}/at the market>.
        {B} [takes|took] {n} <of the/of {P}> {o} <away/home>.
        <{B}/{P} {rel}> [takes|took] {n} {o} from {O}.
        {n} of <the/{P}> {o} [are|were] damaged and [have|had] to be thrown <away/out>.
        {n} of <the/{P}> {o} [are|were] <stolen/lost/lost {place}/taken by {B}/given to {B}/left {place}>.
        {n} of <the/{P}> {o} <[go|went] missing/[get|got] lost> </{place}>.
        {S} <[hands|handed]/[passes|passed]> <of> <over to/on to> {B}.
        {S} [returns|returned] <of> to <the shop/{B}/{his} {rel}>.
        {S} [drops|dropped] <of> and never [finds|found] them again.
        {S} [donates|donated] <of> to <the school/a museum>.
        {B} [asks|asked] for {n} {o}, <and/so> {S} <[agrees|agreed] to give/[gives|gave]> them away.
        {B} [asks|asked] for some {o}, <and/so> {S} <[hands|handed] over/[gives|gave] away> {n} of them.
        {S} [lends|lent] <of> to <someone>.
        {P} collection <[shrinks|shrank]/[gets|got] smaller> by {n} {o}.
        {S} [leaves|left] <of> at <the house of {B}/{B}'s house> for good.
        {S} no longer [needs|needed] <ofthe> and <gives> them to <someone>.
        <{B}/{P} {rel}> [borrows|borrowed] {n} {o} from {O}.
        Because {B} [needs|needed] some {o}, {S} [lets|let] {B} have {n} <of them/{o}>.
        {S} [sends|sent] <of> <to {his} {rel}/to {B}/back to the shop>.
        <Sadly/Unfortunately>, {n} of {P} {o} [are|were] <lost/stolen/damaged and thrown away>.
        <Sadly/Unfortunately>, {S} [loses|lost] <of> <{place}/>.
        {S} [throws|threw] <out/away> {n} <old {o}/damaged {o}/of the {o}/of {his} {o}>.
        {S} [brings|brought] <ofthe> back to <{B}/the shop>.
        {S} [agrees|agreed] to give <of> to <someone>.
        {S} [trades|traded] <of> for <{item}/an old toy>.""",
    "lose_them": """
        {S} <gives> <{n}/{n} of them> to <someone>.
        {S} [gives|gave] away {n} <of them/>.
        {S} <gives> <{B}/{his} {rel}/a friend> {n} <of them/>.
        {S} [loses|lost] {n} <of them/> <{place}/>.
        {S} {uses} {n} <of them/>.
        {S} [sells|sold] {n} <of them/> </to {B}/at the market>.
        {S} <[lends|lent]/[sends|sent]> {n} <of them/> to <someone>.
        {B} [takes|took] {n} of them <away/home>.
        {n} of them [are|were] <lost/stolen/damaged and thrown away/given to {B}/taken by {B}>.""",
    "times": """
        {P} number of {o} <[grows|grew] to/[becomes|became]> {n} times as many.
        {S} [works|worked] hard and [multiplies|multiplied] <the/{his}> number of {o} by {n}.
        {S} [multiplies|multiplied] <the/{his}> number of {o} by {n} </thanks to {B}/with the help of {B}>.
        {S} <[finds|found]/[buys|bought]> more </and more> {o} until {he} <has> {n} times as many </as before>.
        {S} [collects|collected] </even> more until {he} <has> {n} times as many {o} </as before>.
        {S} soon <has> {n} times as many {o} as <before/{he} [had|had had] before/at first>.
        The number of {o} <that {S} [owns|owned]/{S} [has|had]> [becomes|became] {n} times as <large/big>.
        {B} [promises|promised] to multiply <the/{P}> number of {o} by {n} and [does|did] so.
        <Each/Every one> of <the/{P}> {o} [is|was] traded for {n} <smaller/new/other> ones.
        {S} <[swaps|swapped]/[trades|traded]> <each/every one> of <the> for {n} <new/other/smaller> ones.
        Thanks to <{B}/{his} {rel}>, {S} soon <has> {n} times <the number of/as many> {o}.
        {P} collection <[becomes|became]/[grows|grew] until it [is|was]> {n} times as <large/big> </as before>.
        After a visit to {B}, {S} <has> {n} times <as many {o}/as many {o} as before/the number of {o}>.
        The number of <{P}/the> {o} [is|was] multiplied by {n} </with the help of {B}/thanks to {B}>.
        {B} [helps|helped], and {P} collection [grows|grew] <to/until it [is|was]> {n} times <as large/its size>.""",
    "double": """
        {S} [doubles|doubled] <the/{his}> number of {o} </with the help of {B}/thanks to {B}>.
        <The/{P}> number of {o} <[doubles|doubled]/[is|was] doubled> </thanks to {B}/with the help of {B}>.
        {S} soon <has> twice as many {o} as <before/{he} [had|had had] before/at first>.
        {P} collection <[becomes|became]/[grows|grew] until it [is|was]> twice as <large/big> </as before>.
        {P} number of {o} <[grows|grew] to twice as many/[becomes|became] twice as <large/big>>.
        {S} <[finds|found]/[buys|bought]> more </and more> {o} until {he} <has> twice as many </as before>.
        Thanks to <{B}/{his} {rel}/a friend>, {S} soon <has> twice <the number of/as many> {o}.
        {B} [helps|helped], and <the/{P}> number of {o} <[is|was] doubled/[doubles|doubled]>.
        {S} [collects|collected] </even> more until {he} <has> twice as many {o} </as before>.
        {P} <collection/collection of {o}> [doubles|doubled] </in size> </thanks to {B}/with the help of {B}>.""",
    "triple": """
        {S} [triples|tripled] <the/{his}> number of {o} </with the help of {B}/thanks to {B}>.
        <The/{P}> number of {o} <[triples|tripled]/[is|was] tripled> </thanks to {B}/with the help of {B}>.
        {P} collection of {o} <[triples|tripled]/[is|was] tripled> </thanks to {B}/with the help of {B}>.
        {S} soon <has> three times as many {o} as <before/{he} [had|had had] before/at first>.
        {P} collection <[becomes|became]/[grows|grew] until it [is|was]> three times as <large/big> </as before>.
        {B} [helps|helped], and <the/{P}> number of {o} <[is|was] tripled/[triples|tripled]>.
        {P} <collection/collection of {o}> [triples|tripled] in size </thanks to {B}/with the help of {B}>.""",
    "part": """
        {S} <[splits|split]/[divides|divided]> <the> <evenly> into {n} {cs} and [keeps|kept] <only one/a single> {c}.
        {S} [puts|put] <the> into {n} equal <piles/parts> and [gives|gave] away <all but one/all of them but one>.
        {S} [keeps|kept] <only one/just one> out of <every/each> {n} {o}.
        {S} and some friends, {n} people in all, <[share|shared]/[divide|divided]/[split|split]> the {o} <evenly>.
        <{n} {gs}/{n} people>, {S} and some others, <[share|shared]/[divide|divided]> the {o} <evenly>.
        The {o} [are|were] <divided/shared/split> <evenly> among {n} {gs}, and {S} [is|was] one of them.
        The {o} [are|were] <divided/shared/split> <evenly> by {n} people, and {S} [is|was] one of them.
        {S} [packs|packed] <the> into {n} {cs}, the same number in each, and [takes|took] <a single/only one> {c} home.
        {S} [divides|divided] <the> into {n} equal <parts/piles> and <[holds|held] on to/[keeps|kept]> <one/only one>.
        {S} [makes|made] {n} equal <piles/parts> of <the> and <[loses|lost]/[sells|sold]> all but one <pile/part>.
        Out of every {n} {o}, {S} [keeps|kept] <one/only one> and <[sells|sold]/[gives|gave] away> the <rest/others>.
        {B} [divides|divided] the {o} <evenly> among {n} people, so {S} [gets|got] one of {n} equal parts.
        {B} [packs|packed] the {o} <evenly> into {n} {cs}, <and/but> {S} <gets> <only one/just one> of them.""",
    "half": """
        {S} <gives> half <of the/of {his}> {o} to <someone>.
        {S} [gives|gave] away <half of/one half of> <the>.
        {S} [loses|lost] half of <the> <{place}/>.
        {S} [keeps|kept] <only/just> half of <the>.
        <{B}/{P} {rel}> [takes|took] half of <the/{P}> {o}.
        Half of <the/{P}> {o} [are|were] <sold/lost/stolen/given away/taken by {B}/given to {B}>.
        Half of <the/{P}> {o} <[go|went] to {B}/[go|went] missing>.
        {S} <[sells|sold]/[donates|donated]/{uses}> half of <the>.
        {S} [sells|sold] half of <the> <at the market/to {B}>.""",
    "half_them": """
        {S} <gives> <half/one half> of them to <someone>.
        {S} <[gives|gave] away/[sells|sold]/[loses|lost]/{uses}> <half/one half> of them <{place}/>.
        {S} [keeps|kept] <only/just> <half/one half> of them </at home>.
        <{B}/{P} {rel}> [takes|took] half of them <home/away/>.
        Half of them [are|were] <sold/lost/stolen/given away/taken by {B}/given to {B}>.""",
    "third": """
        {S} [keeps|kept] <only/just> <a third/one third> of <the>.
        {S} [gives|gave] away <the>, but <[holds|held] on to/[keeps|kept]> <a third/one third> of them.
        {S} [sells|sold] <the>, but <[holds|held] on to/[keeps|kept]> <a third/one third> of them.
        <Only/Just> <a third/one third> of <the/{P}> {o} [are|were] <left/not sold/not lost/not given away>.
        {S} [loses|lost] <the>, <all but a third of them/but [finds|found] a third of them again>.""",
    "money_gain": """
        {S} <[earns|earned]/<gets>/[is|was] paid> <moredollars> for {job}.
        {B} [pays|paid] {O} <moredollars> </for {job}>.
        <{B}/{P} {rel}> <gives> {O} <moredollars> </as a gift/as a present>.
        {S} [finds|found] <moredollars> <in an old bag/in a jar/{place}>.
        {S} <gets> <moredollars> as a <gift/present> </from {B}>.
        {S} <gets> <moredollars> from <someone>.
        {S} [saves|saved] <{n} more/another {n}/{n} extra> dollars.
        <{B}/{P} {rel}> [returns|returned] {n} dollars that {S} <[lent|had lent] before/[lent|had lent] long ago>.
        {S} [sells|sold] {item} <for {n} dollars/to {B} for {n} dollars/and [gets|got] {n} dollars for it>.
        {S} [wins|won] <moredollars> in a <game/contest>.
        {S} [is|was] given <moredollars> by <someone>.
        {S} [borrows|borrowed] <moredollars> from <someone>.
        For {job}, {S} <[is|was] paid/<gets>> <moredollars>.
        {B} [buys|bought] {item} from {O} <for {n} dollars/and [pays|paid] {n} dollars for it>.
        As a <gift/present>, <{P} {rel}/{B}> <[sends|sent]/<gives>> {O} <moredollars>.""",
    "money_lose": """
        {S} [spends|spent] <moredollars> on {item}.
        {S} [buys|bought] {item} </at the shop/at the market/from {B}> for {n} dollars.
        {S} [pays|paid] {n} dollars for {item} </at the shop/at the market/in town>.
        {S} [pays|paid] {B} {n} dollars for <{item}/{job}>.
        {S} [loses|lost] {n} <of {his}/> dollars <{place}/>.
        {S} <gives> {n} <of {his}/> dollars to <someone>.
        {S} <gives> {B} {n} <of {his}/> dollars.
        {S} <[sees|saw]/[finds|found]> {item} that [costs|cost] {n} dollars and [buys|bought] it.
        {S} <[lends|lent]/[sends|sent]> {n} <of {his}/> dollars to <someone>.
        {S} [donates|donated] {n} <of {his}/> dollars to <the school/a museum>.
        The price of {item} [is|was] {n} dollars, and {S} <[pays|paid] it/[buys|bought] it>.
        {B} [asks|asked] for {n} dollars, <and/so> {S} [hands|handed] them over.
        <{B}/{P} {rel}> <[takes|took]/[borrows|borrowed]> {n} dollars from {O}.
        {S} [hands|handed] over {n} dollars for <{item}/{job}>.
        {S} [asks|asked] for {item} and <[spends|spent] {n} dollars on/[pays|paid] {n} dollars for> it.
        {B} [sells|sold] {O} {item} <for/at a price of> {n} dollars.
        {n} of {P} dollars [are|were] <spent on {item}/lost/stolen/lost {place}>.""",
    "money_times": """
        {S} [saves|saved] <money/more and more> until {he} [has|had] {n} times as much </as before>.
        {P} <savings [grow|grew]/money [grows|grew]> <to/until there [is|was]> {n} times as much </as before>.
        {S} soon [has|had] {n} times as much money <as before/as {he} [had|had had] before/as at first>.
        {S} [works|worked] hard and [multiplies|multiplied] {his} <money/savings> by {n}.
        With <some luck/a bit of luck/the help of {B}>, <the/{P}> money [becomes|became] {n} times as much.
        {S} [works|worked] </hard> until {his} savings [are|were] {n} times as <large/big> </as before>.
        Thanks to <{B}/{his} {rel}>, {S} soon [has|had] {n} times as much money </as before>.""",
    "money_double": """
        {S} [doubles|doubled] <money> </thanks to {B}/with the help of {B}/with some luck>.
        {P} savings [double|doubled] </thanks to {B}/with the help of {B}/thanks to {his} {rel}>.
        {P} money [doubles|doubled] </thanks to {B}/with the help of {B}/thanks to {his} {rel}>.
        {S} soon [has|had] twice as much </money> <as before/as {he} [had|had had] before/as at first>.
        {P} <savings [grow|grew]/money [grows|grew]> <to/until there [is|was]> twice as much </as before>.
        {S} [works|worked] </hard> until {his} <money [is|was]/savings [are|were]> <doubled/twice as large>.
        {S} [saves|saved] <money/more and more> until {he} [has|had] twice as much </as before>.""",
    "money_part": """
        {S} <[splits|split]/[shares|shared]> <money> <evenly> with some friends, {n} people in all.
        {S} [keeps|kept] <one/only one> of {n} equal parts of <money> and [gives|gave] the <rest/others> away.
        <The/{P}> money [is|was] <divided/shared/split> <evenly> among {n} {gs}, and {S} [is|was] one of them.
        {S} [puts|put] <money> into {n} equal piles and <[spends|spent]/[gives|gave] away> all piles but one.
        {S} [keeps|kept] <only one/just one> out of <every/each> {n} dollars.
        {S} [divides|divided] <money> into {n} equal parts and [keeps|kept] <only one/just one> <part/of them>.
        {n} people, {S} and some friends, <[share|shared]/[divide|divided]> the money <evenly>.""",
    "money_half": """
        {S} [spends|spent] half of <money> </on {item}>.
        {S} <gives> half of <money> to <someone>.
        {S} [gives|gave] away half of <money>.
        {S} [loses|lost] half of <money> <{place}/>.
        {S} [keeps|kept] <only/just> half of <money>.
        Half of <the/{P}> money [is|was] <spent on {item}/lost/stolen/taken by {B}/given to {B}>.
        <{B}/{P} {rel}> [takes|took] half of <the/{P}> money.""",
    "sell": """
        {S} [sells|sold] <all> for {n} dollars <each/apiece> </to {B}/at the market>.
        {S} [sells|sold] <every one/each one> of <the> <at a price of/for> {n} dollars.
        {B} [buys|bought] all <of/> {P} {o} <and [pays|paid] {n} dollars for each/for {n} dollars each>.
        Each of <the/{P}> {o} [brings|brought] in {n} dollars when {S} [sells|sold] <them>.
        At the <market/shop>, {S} [gets|got] {n} dollars for each of {his} {o} and [sells|sold] <them>.
        {B} [pays|paid] {O} {n} dollars for <every one/each> of the {o} and [takes|took] <them>.
        {S} [sells|sold] <all>, and each </one/of them> [brings|brought] in {n} dollars.
        All <of/> <the/{P}> {o} [are|were] sold <at a price of {n} dollars each/for {n} dollars each>.""",
}
