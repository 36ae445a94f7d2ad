// Runs in files: traces of `smcjax generate --trace`, and events as this page saves them, one JSON object a line.

import { History, normalized } from "./history.js";

const MAX_PARTICLES = 1024;

/** The history that a file's text holds. Throws an Error, one sentence, where it holds none. */
export function read(text) {
  let whole = null;
  try {
    whole = JSON.parse(text);
  } catch {
    // Several lines, or not JSON at all.
  }
  if (whole?.format === "smcjax-trace") return fromTrace(whole);
  let events;
  try {
    events = text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line));
  } catch {
    throw new Error("The file is no run of smcjax; open one of 'smcjax generate --trace', or one saved here.");
  }
  return fromEvents(events);
}

/** The history of the first choice among these events. */
export function fromEvents(events) {
  const history = new History();
  for (const event of events) {
    if (event?.choice) continue;
    take(history, event);
  }
  if (!history.columns.length) throw new Error("There are no cycles in it; open a run that was traced.");
  return history;
}

/** Gives an event to the history, which is that of a cycle or of the end. */
export function take(history, event) {
  if (event?.end) {
    history.end(event.end);
    return;
  }
  const n = history.particles || event?.ancestors?.length;
  check(n >= 1 && n <= MAX_PARTICLES, "ancestors");
  check(rowsOf(event.ancestors, n) && event.ancestors.every((row) => isRow(row, n)), "ancestors");
  check(rowsOf(event.lengths, n) && event.lengths.every(Number.isFinite), "lengths");
  check(rowsOf(event.finished, n), "finished");
  check(!event.log_weights || rowsOf(event.log_weights, n), "log_weights");
  check(!event.log_potentials || rowsOf(event.log_potentials, n), "log_potentials");
  check(!event.texts || (rowsOf(event.texts, n) && event.texts.every((one) => typeof one === "string")), "texts");
  check(!event.token_ids || rowsOf(event.token_ids, n), "token_ids");
  history.add(event);
}

/** The text of a file with this run. */
export function written(history) {
  const { selected, evidence, weights, texts } = history;
  const end = selected === null ? [] : [{ choice: 0, end: { selected, log_evidence: evidence, weights, texts } }];
  return [...history.events, ...end].map((event) => `${JSON.stringify(event)}\n`).join("");
}

function fromTrace(trace) {
  const { n_particles: n, ancestors, lengths, finished, log_weights: weights, ess, resampled, texts } = trace;
  if (trace.version !== 2) throw new Error(`The trace is of version ${trace.version}, and this page reads version 2.`);
  for (const [name, values] of Object.entries({ ancestors, lengths, finished, log_weights: weights, ess, resampled })) {
    check(rowsOf(values, ancestors?.length), name);
  }
  check(isRow(trace.selected, n), "selected");
  check(texts === null || rowsOf(texts, n), "texts");
  check(rowsOf(trace.final_log_weights, n), "final_log_weights");
  const history = new History();
  ancestors.forEach((rows, t) => {
    check(rowsOf(rows, n), "ancestors");
    const event = { cycle: t + 1, ancestors: rows, lengths: lengths[t], finished: finished[t] };
    take(history, { ...event, log_weights: weights[t], ess: number(ess[t]), resampled: resampled[t] });
  });
  if (!history.columns.length) throw new Error("The trace has no cycles: its answer ended with its first token.");
  const chances = normalized(trace.final_log_weights);
  history.end({ selected: trace.selected, log_evidence: number(trace.log_evidence), weights: chances, texts });
  return history;
}

const number = (value) => (typeof value === "number" ? value : null);
const isRow = (value, n) => Number.isInteger(value) && value >= 0 && value < n;
const rowsOf = (values, n) => Array.isArray(values) && values.length === n;

function check(holds, name) {
  if (!holds) throw new Error(`The run is damaged: its ${name} do not fit; open another one.`);
}
