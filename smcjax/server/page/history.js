// The history of a population, from the events of its cycles.
//
// Column t holds N nodes: what cycle t gave to each row, and the rows' weights before resampling. Row i of the
// population after the cycle goes on from node `ancestors[i]` of the column.

export const FAMILIES = 12;

export class History {
  constructor() {
    this.columns = [];
    this.selected = null; // the row that answered
    this.evidence = null; // log Ẑ as the server says it, at the end
    this.weights = null; // [N] the chance that each row had to answer, at the end
    this.texts = null; // [N] the rows' whole texts, at the end
    this.events = [];
    this._closed = 0; // log Ẑ up to the last resampling
    this._rows = []; // [N] texts so far
    this._colours = [];
  }

  get particles() {
    return this.columns.length ? this.columns[0].ancestors.length : 0;
  }

  /** Takes the event of the next cycle. Cycle 0 of a request that begins again begins the history again. */
  add(event) {
    if (event.cycle === 0 && this.columns.length) Object.assign(this, new History());
    this.events.push(event);
    const n = event.ancestors.length;
    const { ancestors, texts } = event;
    if (!this.columns.length) {
      this._rows = Array(n).fill("");
      this._colours = firstColours(event);
    }
    const before = this.columns.at(-1);
    const weights = normalized(event.log_weights) ?? before?.after ?? Array(n).fill(1 / n);
    const evidence = event.log_weights ? this._closed + logMean(event.log_weights) : (before?.evidence ?? null);
    if (event.resampled) this._closed = evidence;
    const column = {
      cycle: event.cycle,
      words: texts ?? lengthsAdded(event, before),
      weights,
      heaviest: Math.max(...weights),
      colours: this._colours,
      ancestors,
      resampled: event.resampled,
      ess: event.ess,
      potentials: event.log_potentials ?? null, // what the weights have of them after the cycle
      evidence,
      finished: event.finished,
      lengths: event.lengths,
      after: event.resampled ? Array(n).fill(1 / n) : weights,
      rows: texts ? ancestors.map((row) => this._rows[row] + texts[row]) : null,
    };
    this._rows = column.rows ?? this._rows;
    this._colours = event.resampled ? coloursAfter(this._colours, ancestors) : this._colours;
    column.coloursAfter = this._colours;
    this.columns.push(column);
  }

  /** Takes what is known when the request has ended. */
  end({ selected, log_evidence, particles, weights, texts }) {
    this.selected = selected ?? null;
    this.evidence = log_evidence ?? null;
    this.weights = particles?.map((one) => one.weight ?? 0) ?? weights ?? null;
    this.texts = particles?.map((one) => one.text ?? "") ?? texts ?? null;
  }

  /** True where potentials steer the particles. */
  get steered() {
    return this.columns.some((column) => column.potentials?.some((value) => value !== 0));
  }

  /** True where `count` columns are all of a run that has ended. */
  isEnd(count) {
    return this.selected !== null && count === this.columns.length;
  }

  /** [N] weights of the population after the first `count` columns. */
  weightsAt(count) {
    return (this.isEnd(count) && this.weights) || this.columns[count - 1].after;
  }

  /** [N] texts of the population after the first `count` columns; null where none is known. */
  textsAt(count) {
    return (this.isEnd(count) && this.texts) || this.columns[count - 1].rows;
  }

  /** log Ẑ after the first `count` columns; null before there is one. */
  evidenceAt(count) {
    return (this.isEnd(count) ? this.evidence : null) ?? this.columns[count - 1].evidence;
  }

  /** How often the population was resampled in the first `count` columns. */
  resamplings(count) {
    return this.columns.slice(0, count).filter((column) => column.resampled).length;
  }

  /** By column: [N] 1 for nodes from which some row after the first `count` columns descends. */
  living(count) {
    const found = Array(count);
    let rows = [...Array(this.particles).keys()];
    for (let t = count - 1; t >= 0; t--) {
      const column = new Uint8Array(this.particles);
      for (const row of rows) column[this.columns[t].ancestors[row]] = 1;
      found[t] = column;
      rows = [];
      column.forEach((lives, row) => lives && rows.push(row));
    }
    return found;
  }

  /** By column: the node from which this row after the first `count` columns descends. */
  lineage(row, count) {
    const found = Array(count);
    for (let t = count - 1; t >= 0; t--) found[t] = row = this.columns[t].ancestors[row];
    return found;
  }
}

/** [N] weights that sum to 1; null where there are none. Without a finite log weight all are 0. */
export function normalized(logWeights) {
  if (!logWeights) return null;
  const usable = logWeights.map((value) => (Number.isFinite(value) ? value : -Infinity));
  const top = Math.max(...usable);
  if (top === -Infinity) return usable.map(() => 0);
  const weights = usable.map((value) => Math.exp(value - top));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / sum);
}

/** log of the mean of the weights; null (JSON's −∞) weighs nothing. */
export function logMean(logWeights) {
  const usable = logWeights.map((value) => (Number.isFinite(value) ? value : -Infinity));
  const top = Math.max(...usable);
  if (top === -Infinity) return -Infinity;
  return top + Math.log(usable.reduce((sum, value) => sum + Math.exp(value - top), 0) / usable.length);
}

function lengthsAdded(event, before) {
  const after = {};
  event.ancestors.forEach((row, i) => (after[row] = event.lengths[i]));
  return event.ancestors.map((_, row) => {
    const added = after[row] === undefined ? null : after[row] - (before ? before.lengths[row] : 0);
    return added === null ? "" : added ? `+${added}` : "";
  });
}

// A family is what was copied from one ancestor at the last resampling, and before the first one, what begins with the
// same token. The largest part of a family keeps its colour when others split off.

function firstColours(event) {
  const seen = new Map();
  return event.ancestors.map((_, row) => {
    const token = event.token_ids ? String(event.token_ids[row]) : row;
    if (!seen.has(token)) seen.set(token, seen.size % FAMILIES);
    return seen.get(token);
  });
}

function coloursAfter(colours, ancestors) {
  const copies = new Map();
  for (const row of ancestors) copies.set(row, (copies.get(row) ?? 0) + 1);
  const found = new Map();
  const taken = new Set();
  const bySize = [...copies.keys()].sort((a, b) => copies.get(b) - copies.get(a) || a - b);
  for (const row of bySize) {
    if (taken.has(colours[row])) continue;
    found.set(row, colours[row]);
    taken.add(colours[row]);
  }
  let next = Math.max(...colours); // what was used last comes last
  for (const row of bySize) {
    if (found.has(row)) continue;
    let colour = colours[row];
    for (let i = 1; i <= FAMILIES; i++) {
      const candidate = (next + i) % FAMILIES;
      if (!taken.has(candidate)) {
        colour = next = candidate;
        break;
      }
    }
    found.set(row, colour);
    taken.add(colour);
  }
  return ancestors.map((row) => found.get(row));
}
