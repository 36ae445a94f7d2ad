// Below the genealogy, column by column: the effective sample size, the log evidence so far, and of a population that
// potentials steer, the log value of each particle.

const HEIGHT = 40;
const BETWEEN = 18; // a strip's title

/** Pixels that the strips take; a lone sequence has none. */
export function heightOf(history) {
  if (!(history?.particles > 1)) return 0;
  return (history.steered ? 3 : 2) * (HEIGHT + BETWEEN) + 10;
}

/** Draws the strips from `top` on, for the columns `seen` of a tree whose window begins at `from`. */
export function drawStrips(tree, { seen, top, from, width }) {
  const { pen, history, count, colours } = tree;
  const n = history.particles;
  const columns = history.columns;
  const essBottom = top + BETWEEN + HEIGHT;
  const evidenceTop = essBottom + BETWEEN;

  rule(tree, essBottom, from, width);
  for (const t of seen) {
    if (columns[t].ess === null || columns[t].ess === undefined) continue;
    const { x, width: wide } = tree.places[t];
    const high = (HEIGHT * columns[t].ess) / n;
    pen.fillStyle = columns[t].resampled ? colours.accent : colours.ess;
    pen.fillRect(x, essBottom - high, wide, high);
  }
  title(tree, `ESS, of ${n}; stronger where it led to resampling`, from, top);

  if (history.steered) drawPotentials(tree, { seen, top: evidenceTop + HEIGHT, from, width });

  const known = columns.slice(0, count).map((column) => column.evidence).filter(Number.isFinite);
  title(tree, "log evidence so far", from, essBottom + 2);
  rule(tree, evidenceTop + HEIGHT, from, width);
  if (!known.length) return;
  const high = Math.max(...known);
  const low = Math.min(high - 1, ...known); // so that nothing looks like much
  const y = (value) => evidenceTop + 4 + ((HEIGHT - 8) * (high - value)) / (high - low);
  pen.strokeStyle = colours.muted;
  pen.lineWidth = 1.6;
  pen.beginPath();
  let begun = false;
  for (const t of seen) {
    if (!Number.isFinite(columns[t].evidence)) continue;
    const { x, width: wide } = tree.places[t];
    if (begun) pen.lineTo(x, y(columns[t].evidence));
    else pen.moveTo(x, y(columns[t].evidence));
    pen.lineTo(x + wide, y(columns[t].evidence));
    begun = true;
  }
  pen.stroke();
}

/** A mark for the log value of each particle; where a potential forbids one there is none. */
function drawPotentials(tree, { seen, top, from, width }) {
  const { pen, history, count, colours } = tree;
  const columns = history.columns.slice(0, count);
  title(tree, "log potential of each particle", from, top + 2);
  rule(tree, top + BETWEEN + HEIGHT, from, width);
  const known = columns.flatMap((column) => column.potentials ?? []).filter(Number.isFinite);
  if (!known.length) return;
  const high = Math.max(...known);
  const low = Math.min(high - 1, ...known);
  pen.fillStyle = colours.ink;
  for (const t of seen) {
    const { x, width: wide } = tree.places[t];
    for (const value of (columns[t]?.potentials ?? []).filter(Number.isFinite)) {
      pen.fillRect(x, top + BETWEEN + 4 + ((HEIGHT - 8) * (high - value)) / (high - low) - 1, wide, 2);
    }
  }
}

function rule({ pen, colours }, y, from, width) {
  pen.strokeStyle = colours.rule;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(from, y + 0.5);
  pen.lineTo(from + width, y + 0.5);
  pen.stroke();
}

function title({ pen, colours, sans }, text, from, top) {
  pen.font = `11px ${sans}`;
  pen.textBaseline = "middle";
  pen.fillStyle = colours.muted;
  pen.fillText(text, from + 14, top + 9);
}
