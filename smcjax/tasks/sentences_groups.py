"""Sentences that change a quantity by several equal groups, one written line each. Slots and rules: `templates.py`."""

from __future__ import annotations

GROUP_CHANGES = {
    "gain_groups": """
        {S} [buys|bought] <groups_that> </at the shop/at the market/from {B}>.
        {S} [finds|found] <groups_that> </{place}>.
        {S} <gets> <groups_that> from <{B}/{his} {rel}/a friend>.
        {B} <gives> {O} <groups_that>.
        {P} {rel} <[brings|brought]/[sends|sent]/<gives>> {O} <groups>.
        {S} [buys|bought] {n} {cs}, <and each </of them> [contains|contained]/each with/and in each [are|were]> {m} {o}.
        {S} [buys|bought] {n} {cs} of {o}, with {m} <{o}/> in each <{c}/>.
        {S} <gets> {m} {o} from <each/every one> of {n} {gs}.
        {n} {gs} <[give|gave]/[hand|handed]/[bring|brought]> {O} {m} {o} <each/apiece>.
        <Each/Every one> of {n} {gs} <[gives|gave]/[hands|handed]/[brings|brought]> {O} {m} {o}.
        {S} <[collects|collected]/[finds|found]/[buys|bought]> {m} </more> {o} <a day/every day/each day> for {n} days.
        For {n} <days/days in a row>, {S} <[finds|found]/[collects|collected]/[buys|bought]> {m} {o} <a/every/each> day.
        {S} [adds|added] {n} {cs} <with {m} {o} in each/of {m} {o} each/with {m} {o} each> to {his} collection.
        {S} [wins|won] {n} games and <gets> {m} {o} <for each/for each of them/for every one>.""",
    "lose_groups": """
        {S} <gives> {m} {o} to <each/every one> of <{n}/{his} {n}> {gs}.
        {S} <gives> <each/every one> of {n} {gs} {m} {o}.
        {S} <gives> {n} {gs} {m} {o} <each/apiece>.
        {n} {gs} <[get|got]/[receive|received]/[take|took]> {m} {o} <each/apiece> from {O}.
        <Each/Every one> of {n} {gs} <[gets|got]/[receives|received]/[takes|took]> {m} {o} from {O}.
        {S} <[gives|gave] away/[sells|sold]/[loses|lost]> <groups>.
        {S} [fills|filled] {n} {cs} with {m} {o} each and <[sells|sold]/[gives|gave] away> the {cs}.
        {S} [packs|packed] {m} {o} into each of {n} {cs} and <[sells|sold]/[gives|gave] away> the {cs}.
        {S} {uses} {m} {o} <a day/every day/each day> for {n} days.
        For {n} <days/days in a row>, {S} {uses} {m} {o} <a/every/each> day.
        For {n} <days/days in a row>, {S} <[loses|lost]/[gives|gave] away/[sells|sold]> {m} {o} <a/every/each> day.
        {S} <[loses|lost]/[sells|sold]/[gives|gave] away> {m} {o} <a day/every day/each day> for {n} days.
        {B} [takes|took] {n} {cs} <with {m} {o} in each/of {m} {o} each/with {m} {o} each> from {O}.
        {S} [loses|lost] {n} games and [has|had] to give {B} {m} {o} <for each/for each of them/for every one>.""",
    "money_gain_groups": """
        {S} [works|worked] </for> {n} <hours for {m} dollars an hour/hours at {m} dollars an hour>.
        {S} [works|worked] </for> {n} hours and <[earns|earned]/[is|was] paid> {m} dollars <an hour/each hour/per hour>.
        {S} [sells|sold] {n} {x} <for/at> {m} dollars <each/apiece> </to {B}/at the market>.
        {S} [sells|sold] {n} {x}, and each </one/of them> <[brings|brought] in/[costs|cost]> {m} dollars.
        {n} {gs} <[give|gave]/[hand|handed]> {O} {m} dollars <each/apiece>.
        {n} {gs} [pay|paid] {O} {m} dollars <each/apiece> for {job}.
        <Each/Every one> of {n} {gs} <[gives|gave]/[hands|handed]/[pays|paid]> {O} {m} dollars.
        {S} <gets> {m} dollars from <each/every one> of {n} {gs}.
        {S} <[earns|earned]/[saves|saved]> {m} </more> dollars <a day/every day/each day> for {n} days.
        For {n} weeks, {S} <[saves|saved]/[earns|earned]/<gets>> {m} dollars <a/every/each> week.
        {B} [buys|bought] {n} {x} from {O} <for {m} dollars each/and [pays|paid] {m} dollars for each>.""",
    "money_lose_groups": """
        {S} [buys|bought] {n} {x} <for/at> {m} dollars <each/apiece> </at the market/at the shop>.
        {S} [buys|bought] {n} {x} <that cost {m} dollars each/and [pays|paid] {m} dollars for each>.
        {S} [buys|bought] {n} {x}, and each </one/of them> [costs|cost] {m} dollars.
        {S} [pays|paid] {m} dollars for <each/every one> of {n} {x}.
        {S} <[spends|spent]/[loses|lost]> {m} dollars <a day/every day/each day> for {n} days.
        For {n} <days/days in a row>, {S} <[spends|spent]/[loses|lost]> {m} dollars <a/every/each> day.
        {S} <gives> {m} dollars to <each/every one> of <{n}/{his} {n}> {gs}.
        {S} <gives> {n} {gs} {m} dollars <each/apiece>.
        {n} {gs} <[get|got]/[receive|received]/[take|took]> {m} dollars <each/apiece> from {O}.
        {B} [sells|sold] {O} {n} {x} <for/at> {m} dollars <each/apiece>.
        <Each/Every one> of {n} {gs} <[gets|got]/[receives|received]/[takes|took]> {m} dollars from {O}.""",
}
