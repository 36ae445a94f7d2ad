"""Sentences that open a story, one written line each. Slots, choices and rules: `templates.py`."""

from __future__ import annotations

OPENINGS = {
    "open": """
        {A} [has|had] {n} {o} </at home/in {his} room/in a {c}/on the table/in {his} collection>.
        {A} [starts|started] </out/off> with {n} {o} </in a {c}/at home>.
        <first> {A} <has> {n} {o} </in a {c}/at home>.
        {A} <has> a collection <of {n} {o}/with {n} {o} in it/that [contains|contained] {n} {o}>.
        {A} <has> a {c} <of {n} {o}/with {n} {o}/with {n} {o} in it/that [contains|contained] {n} {o}>.
        {A} [keeps|kept] {n} {o} <in a {c}/in a big {c}/at home/in {his} room/in the kitchen>.
        {A} <[picks|picked] up/[finds|found]/[collects|collected]/[gathers|gathered]> {n} {o} {place}.
        {A} <[buys|bought]/[gets|got]> {n} {o} <at the shop/at the market/in town/from {B}/on Monday>.
        There [are|were] {n} {o} in <the/a> {c} that <{A} [owns|owned]/[belongs|belonged] to {A}>.
        {A} <gets> {n} {o} from <{his} {rel}/{B}/a friend> <to start with/as a present/as a gift>.
        {A} [counts|counted] <the/all the> {o} <at home/in the {c}>: there [are|were] {n} <of them/in all/in total>.
        {A} [counts|counted] {n} {o} <at home/in the {c}/in {his} room/on the table/in {his} collection>.
        <first> there [are|were] {n} {o} in <the {c} of {A}/{A}'s {c}/{A}'s collection>.
        {A} [brings|brought] <a {c} with {n} {o}/{n} {o} in a {c}/{n} {o}> <to school/to the park/home>.
        {A} [is|was] <proud of/happy about> <having/owning> {n} {o} </in {his} collection>.
        A {c} <of {n} {o}/with {n} {o} in it/with {n} {o}> [belongs|belonged] to {A}.
        {A}'s <collection/{c}> <[has|had] {n} {o} in it/[contains|contained] {n} {o}/[holds|held] {n} {o}>.
        <Suppose/Suppose that/Imagine that/Let us say that> {A} <has> {n} {o}.""",
    "open_groups": """
        {A} <has> <groups_that>.
        {A} [starts|started] with <groups_that>.
        <first> {A} <has> <groups_that>.
        There [are|were] {n} {cs} <at home/in {A}'s room>, and {A} [keeps|kept] {m} {o} in <each/each one/every {c}>.
        {A} [buys|bought] {n} {cs} of {o}. <Every/Each> {c} <[contains|contained]/[holds|held]> {m} </of them>.
        <Each/Every one> of the {n} {cs} <that {A} [owns|owned]/of {A}> <[contains|contained]/[holds|held]> {m} {o}.
        {A} [fills|filled] {n} {cs} with {m} {o} <each/in each/in every {c}>.
        {A} [starts|started] with {n} {cs}, and <each/every one> of them <[holds|held]/[contains|contained]> {m} {o}.
        {A} <has> {n} {cs}, <and there [are|were]/with> {m} {o} in <each/each of them/every {c}>.
        <A/Each> {c} <[holds|held]/[contains|contained]> {m} {o}, and {A} <has> {n} <such/of these> {cs}.
        {A} [brings|brought] <groups_that> <to school/home>.
        {A} [puts|put] {m} {o} into <each/every one> of {n} {cs}.
        {A} <gets> {m} {o} from <each/every one> of <{n}/{his} {n}> {gs} to start with.""",
    "open_two": """
        {A} <has> {n} {adj} {o} <and/and also/as well as> {m} {adk} {o} </in a {c}/at home>.
        {A} <has> {n} {o} at home and <{m} {o}/{m} more {o}/{m} more/another {m}> <at school/in a {c}>.
        {A} <[finds|found]/[collects|collected]> {n} {o} in the morning and <{m}/{m} more/another {m}> in the afternoon.
        {A} [picks|picked] up {n} {o} <{place}/in the morning> and <{m} more/another {m}> <later/after lunch>.
        In the {c} of {A} there [are|were] {n} {adj} {o}. There [are|were] also {m} {adk} <ones/{o}>.
        {A} [keeps|kept] {n} {o} in one {c} and {m} <{o}/more/more {o}> in <another/another {c}/a second {c}>.
        On Monday {A} <[collects|collected]/[buys|bought]/[gets|got]> {n} {o}, and on Friday <{m} more/another {m}>.
        {A} <[buys|bought]/[gets|got]> {n} {adj} {o} and {m} {adk} <ones/{o}> <at the shop/at the market/in town>.
        There [are|were] {n} {adj} {o} and </also> {m} {adk} <{o}/ones> in {A}'s {c}.
        In one {c} {A} <has> {n} {o}, and in <another/another {c}/a second {c}> {m} <more/{o}/more {o}>.
        {A} <gets> {n} {o} from {B} and <{m}/{m} more/another {m}> from {his} {rel}.
        {A}'s {c} <[contains|contained]/[holds|held]> {n} {adj} {o} and {m} {adk} <ones/{o}>.""",
    "money_open": """
        {A} [has|had] {n} dollars </in a jar/in {his} wallet/in {his} pocket/in savings/at home>.
        {A} [starts|started] </out/off> with {n} dollars </in a jar/in {his} wallet/of savings>.
        <first> {A} [has|had] {n} dollars </of savings/in savings/in {his} wallet/in a jar>.
        There [are|were] {n} dollars in <the wallet/the jar> <that {A} [owns|owned]/of {A}>.
        {A} <[keeps|kept]/[saves|saved]> {n} dollars in <a jar/{his} wallet/a small box>.
        {A} <has> <a wallet/a jar> with {n} dollars in it.
        {A} <[earns|earned]/<gets>> {n} dollars for {job} </on Monday/in the morning>.
        <The savings of {A}/{A}'s savings> [are|were] {n} dollars </in the beginning/at first>.
        {A} <gets> {n} dollars from <{his} {rel}/{B}/a friend> </as a gift/as a present/to start with>.
        In {A}'s <wallet/jar/pocket> there [are|were] {n} dollars.
        <Suppose/Suppose that/Imagine that/Let us say that> {A} [has|had] {n} dollars.""",
    "money_open_groups": """
        {A} [saves|saved] {m} dollars <a week/every week/each week> for {n} weeks.
        {A} [works|worked] </for> {n} hours and [earns|earned] {m} dollars <an hour/every hour/each hour/per hour>.
        {A} [earns|earned] {m} dollars <an hour/each hour/per hour> and [works|worked] </for> {n} hours.
        {A} [works|worked] for {n} <hours at {m} dollars an hour/days at {m} dollars a day> </{place}>.
        For {n} days, {A} <[earns|earned]/[saves|saved]/<gets>> {m} dollars <every/each/a> day.
        For {n} weeks, {A} <[earns|earned]/[saves|saved]/<gets>> {m} dollars <every/each/a> week.
        {A} [has|had] {n} jars with {m} dollars <each/in each/in each jar/in every jar>.
        <Every week/Each week> {A} <[puts|put]/[places|placed]> {m} dollars into a jar, for {n} weeks.
        For {n} weeks, {A} [puts|put] {m} dollars <a week/every week/each week> into <a jar/{his} wallet>.
        {A} [sells|sold] {n} {x} for {m} dollars <each/apiece> </at the market/to {B}>.
        {A} <gets> {m} dollars from <each/every one> of {his} {n} {gs}.""",
}
