// What drives the page in Chromium has in common: the browser, and a long run to show.

const { chromium } = require("playwright-core");

// No sandbox, for root; and a browser that asks nobody anything by itself.
const ARGUMENTS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

/** A headless browser of a profile of its own, which goes with it. */
function launch(executablePath) {
  return chromium.launch({ executablePath, args: ARGUMENTS, timeout: 120_000 });
}

const WORDS = "the of and a to in he has 12 apples. She gives it 7 more; how many are left? So \n Tom 40 books =".split(" ");

/** Numbers in [0, 1), the same in every run. */
function random(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** A run as the page saves it: one event a cycle, in which each particle is given `gamma` + 1 words, and the end. */
function longRun({ particles, cycles, gamma = 4, seed = 1 }) {
  const next = random(seed);
  const rows = [...Array(particles).keys()];
  const uniform = rows.map(() => 0);
  const events = [];
  let logWeights = uniform;
  for (let cycle = 0; cycle < cycles; cycle++) {
    const words = () => [...Array(cycle ? gamma + 1 : 1)].map(() => ` ${WORDS[Math.floor(next() * WORDS.length)]}`);
    const texts = rows.map(() => words().join(""));
    logWeights = logWeights.map((value) => value + 0.8 * (next() + next() + next() - 1.5));
    const weights = logWeights.map(Math.exp);
    const sum = weights.reduce((a, b) => a + b, 0);
    const ess = sum ** 2 / weights.reduce((a, b) => a + b * b, 0);
    const resampled = ess < particles / 2;
    events.push({
      cycle,
      token_ids: texts.map((_, row) => [row % 7]),
      texts,
      ancestors: resampled ? systematic(weights, next()) : rows,
      lengths: rows.map(() => 10 + cycle * (gamma + 1)),
      finished: rows.map(() => false),
      log_weights: logWeights,
      ess,
      resampled,
    });
    if (resampled) logWeights = uniform;
  }
  events.push({ end: { selected: 0, log_evidence: -1, weights: rows.map(() => 1 / particles) } });
  return events;
}

/** Ancestors by systematic resampling. */
function systematic(weights, offset) {
  const n = weights.length;
  const sum = weights.reduce((a, b) => a + b, 0);
  let [row, below] = [0, weights[0]];
  return weights.map((_, i) => {
    const place = ((i + offset) / n) * sum;
    while (below < place && row < n - 1) below += weights[++row];
    return row;
  });
}

module.exports = { launch, longRun };
