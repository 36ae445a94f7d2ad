// The genealogy on a canvas as wide as its window: only the columns that are seen are drawn, so that thousands of boxes
// cost no more than those on the screen. Sizes and the place of the window are kept here, since asking the document for
// them while a frame is made has it lay out the page again.

import { drawStrips, heightOf } from "./strips.js";

const TOP = 26; // the cycles' numbers
const LEFT = 14;
const INSET = 7; // between a box and its words
const GAP = 18; // between columns, where every row just goes on
const FAN = 44; // where rows are copied
const TAIL = 46; // behind the last column

export class Tree {
  constructor(scroller, spacer, canvas) {
    Object.assign(this, { scroller, spacer, canvas, pen: canvas.getContext("2d") });
    this.width = scroller.clientWidth; // of the window
    this.from = 0; // where the window begins
    this.following = false; // the next frame shows the last column
    this.scroller.addEventListener("scroll", () => this._scrolled(), { passive: true });
    new ResizeObserver(() => {
      this.width = scroller.clientWidth;
      if (this.history) this.show(this.history, this.count, this.traced);
      this.redraw();
    }).observe(scroller);
    this.restyle();
    this.clear();
  }

  /** Forgets what was shown. */
  clear() {
    this.history = null;
    this.places = [];
    this.whole = 0; // width of all columns
    this.redraw();
  }

  /** Reads the colours and the font of the page again. */
  restyle() {
    const style = getComputedStyle(this.canvas);
    const names = ["paper", "ink", "muted", "faint", "rule", "answer", "accent", "ess"];
    // Only where it is a colour of something does the document say which of the two a light-dark() is.
    const colour = (name) => {
      this.canvas.style.color = `var(--${name})`;
      return style.color;
    };
    this.colours = Object.fromEntries(names.map((name) => [name, colour(name)]));
    this.families = [...Array(12).keys()].map((i) => colour(`family-${i}`));
    this.sans = style.getPropertyValue("--sans").trim();
    this.redraw();
  }

  /** Shows the first `count` columns, and the line of row `traced` if it is not null. */
  show(history, count, traced) {
    if (history !== this.history || history.columns[0] !== this.first) this.places = [];
    Object.assign(this, { history, count, traced, first: history.columns[0] });
    const n = history.particles;
    this.row = n <= 8 ? 30 : n <= 16 ? 24 : n <= 32 ? 19 : 14;
    this.font = `${n <= 8 ? 13 : n <= 16 ? 12.5 : n <= 32 ? 11.5 : 9.5}px ${this.sans}`;
    this.living = history.living(count);
    this.line = traced === null ? null : history.lineage(traced, count);
    this._place();
    if (this.from + this.width >= this.whole - 40) this.following = true;
    this.whole = Math.max(this._end() + TAIL, this.width);
    this.from = Math.min(this.from, this.whole - this.width);
    this.spacer.style.width = `${this.whole}px`;
    this.redraw();
  }

  /** The width of the whole run. */
  end() {
    const last = this.places.at(-1);
    return last ? last.x + last.width + TAIL : 0;
  }

  /** Scrolls so that this place is in the middle of the window. */
  goTo(place) {
    this.following = false;
    this.scroller.scrollLeft = place - this.width / 2;
  }

  /** Scrolls so that the last column is seen. */
  follow() {
    this.following = true;
    this.redraw();
  }

  _scrolled() {
    this.from = this.scroller.scrollLeft;
    this.redraw();
  }

  redraw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this._draw();
    });
  }

  _end() {
    const last = this.places[this.count - 1];
    return last.x + last.width;
  }

  _place() {
    const { pen, history } = this;
    pen.font = this.font;
    const widest = this.width < 500 ? 120 : 190;
    if (widest !== this.widest) this.places = [];
    this.widest = widest;
    while (this.places.length < history.columns.length) {
      const column = history.columns[this.places.length];
      const before = this.places.at(-1);
      const labels = column.words.map((words) => this._fitted(shown(words), widest));
      const width = Math.max(16, ...labels.map((label) => pen.measureText(label).width)) + 2 * INSET;
      const gap = history.columns[this.places.length - 1]?.resampled ? FAN : GAP;
      this.places.push({ x: before ? before.x + before.width + gap : LEFT, width, labels });
    }
  }

  _fitted(text, width) {
    const { pen } = this;
    if (pen.measureText(text).width <= width) return text;
    let [low, high] = [0, text.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
      else high = middle - 1;
    }
    return `${text.slice(0, low)}…`;
  }

  _y(row) {
    return TOP + (row + 0.5) * this.row;
  }

  _draw() {
    const { canvas, pen, scroller, history, width } = this;
    const ratio = devicePixelRatio || 1;
    const tree = history ? TOP + history.particles * this.row + 8 : 0;
    const strips = heightOf(history);
    const height = history ? tree + strips : 0;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    if (!history) return;
    if (this.following) {
      scroller.scrollLeft = this.whole;
      this.from = scroller.scrollLeft;
      this.following = false;
    }
    const { from } = this;
    this.moved?.();
    pen.translate(-from, 0);
    const seen = this._seen(from, from + width);
    for (const t of seen) this._edges(t);
    this._heads();
    for (const t of seen) this._boxes(t);
    if (this.line) this._lineage(seen);
    for (const t of seen) this._heading(t, tree);
    if (strips) drawStrips(this, { seen, top: tree, from, width });
  }

  /** The columns between two places, one more on either side. */
  _seen(from, to) {
    const { places, count } = this;
    let [first, end] = [0, count];
    while (first < end) {
      const middle = (first + end) >> 1;
      if (places[middle].x + places[middle].width + FAN < from) first = middle + 1;
      else end = middle;
    }
    const found = [];
    for (let t = first; t < count && places[t].x - FAN <= to; t++) found.push(t);
    return found;
  }

  /** The pen of lines to a node. */
  _look(t, row) {
    const lives = this.living[t][row];
    this.pen.globalAlpha = lives ? 0.8 : 0.6;
    this.pen.strokeStyle = lives ? this.families[this.history.columns[t].colours[row]] : this.colours.faint;
    this.pen.lineWidth = lives ? 1.6 : 1;
  }

  /** What leads into column t. */
  _edges(t) {
    if (t === 0) return;
    const { pen, history } = this;
    const { ancestors } = history.columns[t - 1];
    const x0 = this.places[t - 1].x + this.places[t - 1].width;
    const x1 = this.places[t].x;
    ancestors.forEach((source, row) => {
      this._look(t, row);
      this._curve(x0, this._y(source), x1, this._y(row));
    });
    pen.globalAlpha = 1;
  }

  /** The rows behind the last column, as dots the larger the more they weigh. */
  _heads() {
    const { pen, history, count } = this;
    const column = history.columns[count - 1];
    const weights = history.weightsAt(count);
    const top = Math.max(...weights);
    const x = this._end();
    column.ancestors.forEach((source, row) => {
      const answers = history.isEnd(count) && row === history.selected;
      const colour = answers ? this.colours.answer : this.families[column.coloursAfter[row]];
      pen.strokeStyle = pen.fillStyle = colour;
      pen.lineWidth = 1.2;
      this._curve(x, this._y(source), x + 26, this._y(row));
      pen.beginPath();
      pen.arc(x + 28, this._y(row), 1.2 + (this.row / 2 - 3) * 0.75 * Math.sqrt(top ? weights[row] / top : 0), 0, 7);
      pen.fill();
    });
  }

  _curve(x0, y0, x1, y1) {
    const { pen } = this;
    pen.beginPath();
    pen.moveTo(x0, y0);
    if (y0 === y1) pen.lineTo(x1, y1);
    else pen.bezierCurveTo((x0 + x1) / 2, y0, (x0 + x1) / 2, y1, x1, y1);
    pen.stroke();
  }

  /** True for the node of a row that had ended before. */
  _over(t, row) {
    return t > 0 && this.history.columns[t - 1].finished[row];
  }

  _boxes(t) {
    const { pen, history, living } = this;
    const column = history.columns[t];
    const { x, width, labels } = this.places[t];
    const height = this.row - (this.row > 16 ? 4 : 2);
    pen.font = this.font;
    pen.textBaseline = "middle";
    for (let row = 0; row < history.particles; row++) {
      if (this._over(t, row)) {
        this._look(t, row);
        this._curve(x, this._y(row), x + width, this._y(row));
        continue;
      }
      const weight = column.heaviest ? column.weights[row] / column.heaviest : 0;
      const y = this._y(row);
      const lives = living[t][row];
      const colour = lives ? this.families[column.colours[row]] : this.colours.faint;
      pen.beginPath();
      pen.roundRect(x, y - height / 2, width, height, 4);
      pen.fillStyle = this.colours.paper;
      pen.fill();
      pen.fillStyle = colour;
      pen.globalAlpha = lives ? 0.07 + 0.33 * weight : 0.05 + 0.25 * weight;
      pen.fill();
      pen.globalAlpha = lives ? 0.9 : 0.7;
      pen.beginPath(); // a bar as high as the weight
      const bar = Math.max(1.5, height * weight);
      pen.roundRect(x, y + height / 2 - bar, 3, bar, 1.5);
      pen.fill();
      pen.globalAlpha = lives ? 0.6 + 0.4 * weight : 0.6 + 0.3 * weight;
      pen.fillStyle = lives ? this.colours.ink : this.colours.muted;
      pen.fillText(labels[row], x + INSET, y + 0.5);
    }
    pen.globalAlpha = 1;
  }

  /** The line of one row, through these columns. */
  _lineage(seen) {
    const { pen, history, count, line, traced } = this;
    const height = this.row - (this.row > 16 ? 4 : 2);
    pen.strokeStyle = this.colours.answer;
    pen.lineWidth = 2.4;
    for (const t of seen) {
      const { x, width } = this.places[t];
      if (this._over(t, line[t])) {
        this._curve(x, this._y(line[t]), x + width, this._y(line[t]));
      } else {
        pen.beginPath();
        pen.roundRect(x, this._y(line[t]) - height / 2, width, height, 4);
        pen.stroke();
      }
      const next = t + 1 < count ? line[t + 1] : traced;
      const to = t + 1 < count ? this.places[t + 1].x : x + width + 26;
      this._curve(x + width, this._y(line[t]), to, this._y(next));
    }
  }

  /** The cycle's number, and a rule where the population was resampled behind it. */
  _heading(t, bottom) {
    const { pen, history } = this;
    const column = history.columns[t];
    const { x, width } = this.places[t];
    pen.font = `11px ${this.sans}`;
    pen.textBaseline = "middle";
    pen.fillStyle = this.colours.muted;
    pen.fillText(String(column.cycle), x + 1, TOP / 2);
    if (!column.resampled) return;
    const middle = x + width + (t + 1 < this.count ? FAN / 2 : 13);
    pen.strokeStyle = this.colours.faint;
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(middle, TOP - 6);
    pen.lineTo(middle, bottom + heightOf(history));
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = this.colours.ink;
    pen.beginPath();
    pen.moveTo(middle - 4, TOP - 14);
    pen.lineTo(middle + 4, TOP - 14);
    pen.lineTo(middle, TOP - 7);
    pen.fill();
  }
}

// Control characters, and those that turn the direction of text.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

/** Words on one line, without the space before them, and with what cannot be seen made visible. */
function shown(words) {
  return words.replace(/^ /, "").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(UNSEEN, "\ufffd");
}
