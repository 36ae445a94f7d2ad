// What stands around the genealogy: figures, and the texts of the population. All text goes in as `textContent`.

const MAX_TEXTS = 24; // in the list; more of them cost time and nobody reads them

export const at = (id) => document.getElementById(id);

/** A number for people; a dash for none. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "–";
  return value.toFixed(digits).replace("-", "−");
}

/** The figures after the first `count` columns. */
export function showFacts(history, count) {
  const column = history.columns[count - 1];
  const n = history.particles;
  at("fact-cycle").textContent = String(column.cycle);
  at("fact-particles").textContent = String(n);
  at("fact-ess").textContent = Number.isFinite(column.ess) ? `${column.ess.toFixed(1)} of ${n}` : "–";
  at("fact-resamplings").textContent = String(history.resamplings(count));
  at("fact-evidence").textContent = figure(history.evidenceAt(count));
}

/** The population's different texts, the answered one first, then by weight: {text, weight, rows, selected}. */
export function groups(history, count) {
  const texts = history.textsAt(count);
  if (!texts) return [];
  const weights = history.weightsAt(count);
  const found = new Map();
  texts.forEach((text, row) => {
    const group = found.get(text) ?? { text, weight: 0, rows: [], selected: false };
    group.weight += weights[row];
    group.rows.push(row);
    group.selected ||= history.isEnd(count) && row === history.selected;
    found.set(text, group);
  });
  return [...found.values()].sort((a, b) => b.selected - a.selected || b.weight - a.weight || a.rows[0] - b.rows[0]);
}

/** How the answer of a run was chosen: a sentence, or nothing before the end and where there was no choice. */
export function chosen(history, how = "one") {
  const count = history.columns.length;
  if (!history.isEnd(count) || history.particles < 2) return "";
  const [{ weight }] = groups(history, count);
  return `${how} ${how === "drawn" ? "from" : "of"} ${history.particles} particles; this text had weight ${percent(weight)}`;
}

const percent = (weight) => `${(100 * weight).toFixed(weight < 0.0995 ? 1 : 0)}%`;

/** The list of these texts. `trace(row)` is called with the row that is pointed at, and with null afterwards. */
export function showTexts(history, count, trace, badge) {
  const list = at("texts");
  const found = groups(history, count).filter((group, index) => index < MAX_TEXTS || group.selected);
  const common = found.length > 1 ? commonStart(found.map((group) => group.text)) : 0;
  const colours = history.columns[count - 1].coloursAfter;
  found.forEach((group, index) => fill(list.children[index] ?? list.appendChild(item(trace)), group, common, colours, badge));
  while (list.children.length > found.length) list.lastChild.remove();
  const focused = [...list.children].find((one) => one === document.activeElement);
  [...list.children].forEach((one, index) => (one.tabIndex = one === focused || (!focused && index === 0) ? 0 : -1));
}

function item(trace) {
  const one = document.createElement("li");
  const share = made("span", "share");
  share.append(document.createTextNode(""), made("span", "bar"));
  const text = made("span", "text");
  text.append(made("span", "badge"), made("span", "common"), document.createTextNode(""));
  one.append(share, text);
  one.addEventListener("mouseenter", () => trace(Number(one.dataset.row)));
  one.addEventListener("mouseleave", () => trace(null));
  one.addEventListener("focus", () => trace(Number(one.dataset.row)));
  one.addEventListener("blur", () => trace(null));
  one.addEventListener("keydown", (event) => {
    const next = { ArrowDown: one.nextSibling, ArrowUp: one.previousSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    [one.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
  });
  return one;
}

function fill(one, { text, weight, rows, selected }, common, colours, badge) {
  const [share, words] = one.children;
  share.firstChild.data = rows.length > 1 ? `${percent(weight)}  ×${rows.length}` : percent(weight);
  const bar = share.lastChild;
  bar.style.width = `${Math.max(2, 100 * weight)}%`;
  bar.style.background = `var(--family-${colours[rows[0]]})`;
  words.children[0].textContent = selected ? `${badge} ` : "";
  words.children[1].textContent = text.slice(0, common);
  words.lastChild.data = text.slice(common) || (common ? "" : "(nothing)");
  one.className = selected ? "selected" : "";
  one.dataset.row = String(rows[0]);
}

function made(tag, name) {
  const element = document.createElement(tag);
  element.className = name;
  return element;
}

function commonStart(texts) {
  let length = Math.min(...texts.map((text) => text.length));
  for (const text of texts) {
    let i = 0;
    while (i < length && text[i] === texts[0][i]) i++;
    length = i;
  }
  return length;
}
