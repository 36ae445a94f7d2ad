// The whole run on one small canvas, with a frame around what the genealogy's window shows of it.

const TOP = 10; // marks of resamplings

export class Overview {
  constructor(box, canvas, frame, tree) {
    Object.assign(this, { box, canvas, frame, tree, width: 0 });
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.redraw();
    }).observe(box);
    tree.moved = () => this._move();
  }

  /** Shows this run, which has ended; nothing for null, and where the genealogy's window has room for all of it. */
  show(history) {
    if (history === this.history) return;
    this.history = history;
    if (!history) return;
    const cycles = history.columns.filter((column) => column.resampled).map((column) => column.cycle);
    const told = cycles.length ? `resampled after ${cycles.join(", ")}` : "never resampled";
    this.canvas.setAttribute("aria-label", `The whole run: ${history.columns.length} cycles, ${told}.`);
    this.redraw();
  }

  /** The place in the genealogy that stands under a place of the screen. */
  placeOf(clientX) {
    const { left, width } = this.box.getBoundingClientRect();
    return ((clientX - left) / width) * this.tree.end();
  }

  _move() {
    const { tree, width } = this;
    this.box.hidden = !this.history || tree.end() <= tree.width;
    if (this.box.hidden || !width) return;
    const scale = width / tree.end();
    this.frame.style.transform = `translateX(${tree.from * scale}px)`;
    this.frame.style.width = `${Math.min(width, tree.width * scale)}px`;
  }

  redraw() {
    const { canvas, tree, history, width } = this;
    if (!history || this.box.hidden || !width) return;
    const [ratio, height] = [devicePixelRatio || 1, canvas.clientHeight];
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const scale = width / tree.end();
    const [n, count] = [history.particles, history.columns.length];
    const x = (t) => (t < count ? tree.places[t].x : tree.end() - 20) * scale;
    const y = (row) => TOP + ((row + 0.5) * (height - TOP)) / n;
    const living = history.living(count);
    const line = [...history.lineage(history.selected, count), history.selected];
    const paths = new Map(); // a colour's lines as one
    const step = (colour, t, from, to) => {
      if (!paths.has(colour)) paths.set(colour, new Path2D());
      const path = paths.get(colour);
      path.moveTo(x(t), y(from));
      path.lineTo(Math.max(x(t), x(t + 1) - Math.min(6, (x(t + 1) - x(t)) / 2)), y(from));
      path.lineTo(x(t + 1), y(to));
    };
    history.columns.forEach((column, t) => {
      column.ancestors.forEach((from, to) => {
        const lives = t + 1 < count ? living[t + 1][to] : true;
        step(lives ? tree.families[column.colours[from]] : tree.colours.faint, t, from, to);
      });
    });
    const draw = (colour, width) => {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.stroke(paths.get(colour));
    };
    const { faint, answer, ink } = tree.colours;
    const thin = n <= 16 ? 1.3 : 0.7;
    if (paths.has(faint)) draw(faint, thin);
    for (const colour of paths.keys()) if (colour !== faint) draw(colour, thin);
    line.slice(1).forEach((to, t) => step(answer, t, line[t], to));
    draw(answer, 2.2);
    pen.fillStyle = ink;
    history.columns.forEach((column, t) => {
      if (!column.resampled) return;
      pen.beginPath();
      pen.moveTo(x(t + 1) - 4, 1);
      pen.lineTo(x(t + 1) + 4, 1);
      pen.lineTo(x(t + 1), 8);
      pen.fill();
    });
    this._move();
  }
}
