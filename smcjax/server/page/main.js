// The page: asks, shows what comes, and shows again what came.

import { answer, eventsOf, listModels, Refused } from "./api.js";
import { History } from "./history.js";
import { Overview } from "./overview.js";
import { fromEvents, read, take, written } from "./stored.js";
import { Tree } from "./tree.js";
import { at, chosen, figure, groups, showFacts, showTexts } from "./view.js";

const tree = new Tree(at("scroller"), at("spacer"), at("tree"));
const overview = new Overview(at("overview"), at("whole"), at("window"), tree);
const FRAME = 120; // milliseconds of a cycle that is played again

let models = [];
let history = new History();
let running = null; // the AbortController of what is under way
let shown = 0; // columns
let live = true; // the newest column is shown
let pointed = null; // the row that the reader points at
let playing = null; // the timer of a run that is shown again
let certain = ""; // the answer as far as it is told
let turns = []; // a chat's messages
let how; // how the answer was chosen: "drawn", "the heaviest", or unknown

// ------------------------------------------------------------------------------------------------ showing

let waiting = false;

/** Shows the present state with the next frame, once however often it changed. */
function refresh() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    show();
  });
}

function show() {
  at("certain").textContent = certain;
  at("chosen").textContent = running ? "" : chosen(history, how);
  const count = history.columns.length;
  at("empty").hidden = count > 0;
  at("scrub").disabled = at("play").disabled = at("save").disabled = count === 0;
  if (!count) return;
  if (live) shown = count;
  shown = Math.min(shown, count);
  at("scrub").max = String(count);
  at("scrub").value = String(shown);
  at("scrub").setAttribute("aria-valuetext", `cycle ${history.columns[shown - 1].cycle}`);
  const ended = history.isEnd(shown);
  const traced = pointed !== null && pointed < history.particles ? pointed : ended ? history.selected : null;
  tree.show(history, shown, traced);
  overview.show(history.isEnd(count) && history.particles > 1 ? history : null);
  if (playing) tree.follow();
  showFacts(history, shown);
  showTexts(history, shown, point, how ? `the answer, ${how}` : "the answer");
  at("tentative").textContent = running ? tentative() : "";
  describe();
}

/** What the heaviest text adds to the certain one. */
function tentative() {
  const best = groups(history, history.columns.length)[0];
  return best?.text.startsWith(certain) ? best.text.slice(certain.length) : "";
}

function describe() {
  const column = history.columns[shown - 1];
  const parts = [`${history.particles} particles after cycle ${column.cycle}`];
  parts.push(`${history.resamplings(shown)} resamplings`, `log evidence ${figure(history.evidenceAt(shown))}`);
  if (history.isEnd(shown)) parts.push(`particle ${history.selected} answered`);
  at("tree").setAttribute("aria-label", `${parts.join(", ")}.`);
}

function point(row) {
  pointed = row;
  refresh();
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function reset() {
  history = new History();
  [certain, live, pointed, shown, how] = ["", true, null, 0, undefined];
  at("texts").replaceChildren();
  at("tentative").textContent = "";
  for (const one of document.querySelectorAll("#facts dd")) one.textContent = "–";
  at("tree").setAttribute("aria-label", "No particles yet");
  tree.clear();
  overview.show(null);
  stopPlaying();
  refresh();
}

// ------------------------------------------------------------------------------------------------ asking

const chatting = () => document.querySelector("input[name=mode]:checked").value === "chat";

function body(prompt) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  return {
    model: at("model").value || undefined,
    ...(chatting() ? { messages: [...turns, { role: "user", content: prompt }] } : { prompt }),
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    stream: true,
    smc: {
      events: true,
      control: at("control").disabled ? undefined : number("control"),
      potentials: at("potentials").disabled ? undefined : picked(at("potentials")),
    },
  };
}

/** The values of a list that are chosen; undefined for none. */
function picked(select) {
  const values = [...select.selectedOptions].map((option) => option.value);
  return values.length ? values : undefined;
}

async function send() {
  const prompt = at("prompt").value;
  if (running || !prompt) return;
  const chat = chatting();
  const request = body(prompt);
  reset();
  const mine = busy(new AbortController());
  at("answer").scrollIntoView({ block: "nearest" });
  if (chat) {
    showTurns(request.messages);
    at("prompt").value = "";
  }
  say("Waiting for the first tokens …");
  const slow = setTimeout(() => say("Waiting … a decoder's first request compiles its programs."), 4000);
  try {
    const path = chat ? "/v1/chat/completions" : "/v1/completions";
    for await (const chunk of answer(path, request, { key: at("key").value, signal: mine.signal })) {
      clearTimeout(slow);
      receive(chunk);
    }
    if (chat) turns = [...request.messages, { role: "assistant", content: certain }];
  } catch (error) {
    if (running !== mine) return; // something else is shown by now
    failed(error);
    if (chat) {
      showTurns(turns);
      at("prompt").value ||= prompt;
    }
  } finally {
    clearTimeout(slow);
    if (running === mine) busy(null);
    refresh();
  }
}

function receive(chunk) {
  const choice = chunk.choices[0];
  certain += choice?.text ?? choice?.delta?.content ?? "";
  const { smc } = chunk;
  if (smc?.cycle) {
    take(history, smc.cycle);
    if (smc.cycle.cycle === 0) say("Thinking …");
  }
  if (choice?.finish_reason) {
    if (smc?.particles) history.end(smc);
    how = smc?.select === "best" ? "the heaviest" : "drawn";
    at("more").open ||= Boolean(smc?.warning); // which advises a control
    const parts = [`Ended by ${choice.finish_reason}`];
    if (smc?.cycles !== undefined) parts.push(`${smc.cycles} cycles`, `${smc.resamples} resamplings`);
    if (smc?.routed) parts.push(`answered by ${chunk.model}: ${smc.routed}`);
    if (smc?.warning) parts.push(smc.warning);
    say(`${parts.join(" · ")}.`);
    at("request").value = chunk.id;
  }
  refresh();
}

function failed(error) {
  if (error.name === "AbortError") say("Stopped.");
  else say(error instanceof Refused ? error.message : `The answer broke off: ${error.message}`, true);
  if (error.status !== 401) return;
  at("more").open = true;
  at("key").focus();
}

function busy(controller) {
  const focused = [at("send"), at("stop")].includes(document.activeElement);
  running = controller;
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
  if (focused) (controller ? at("stop") : at("send")).focus();
  return controller;
}

/** Ends what is under way, and listens to it no more. */
function giveUp() {
  running?.abort();
  busy(null);
}

/** The messages of a conversation; the answer to them stands below. */
function showTurns(messages) {
  const made = messages.map(({ role, content }) => {
    const one = document.createElement("p");
    one.className = `turn ${role}`;
    one.textContent = content;
    return one;
  });
  at("turns").replaceChildren(...made);
  at("clear").hidden = made.length === 0;
}

function clear() {
  giveUp();
  turns = [];
  showTurns(turns);
  reset();
  say("");
  at("prompt").focus();
}

async function fillModels() {
  const before = at("model").value;
  try {
    models = await listModels(at("key").value);
  } catch (error) {
    failed(error);
    return;
  }
  const own = models.filter((model) => model.id !== model.root); // the pair's own name is that of the first
  const listed = models.filter((model) => !own.includes(model));
  at("model").replaceChildren(...listed.map((model) => new Option(model.id, model.id)));
  if (listed.some((model) => model.id === before)) at("model").value = before;
  if (at("status").classList.contains("wrong")) say("");
  at("bundled").hidden = own[0]?.id !== "bundled";
  describeModel();
}

function describeModel() {
  const smc = models.find((model) => model.id === at("model").value)?.smc;
  if (!smc) return;
  at("control").disabled = smc.exact;
  at("control").placeholder = smc.exact ? "none" : `${smc.control ?? "the decoder's"}`;
  const names = smc.potentials ?? [];
  const before = picked(at("potentials")) ?? [];
  at("potentials").replaceChildren(...names.map((name) => new Option(name, name, false, before.includes(name))));
  at("potentials").disabled = !smc.n_particles || !names.length;
  at("steering").hidden = !names.length;
  const parts = [];
  if (smc.n_particles) parts.push(`N = ${smc.n_particles} particles`);
  if (smc.n_candidates > 1) parts.push(`${smc.n_candidates} candidates`);
  if (smc.gamma) parts.push(`K = ${smc.gamma} tokens drafted a cycle`);
  if (smc.control) parts.push(`control ${smc.control}`);
  parts.push(smc.exact ? "exact, without a population" : "a weighted population");
  at("decoder").textContent = parts.join(" · ");
}

// ------------------------------------------------------------------------------------------------ showing again

function play() {
  if (playing) {
    stopPlaying();
    return;
  }
  live = false;
  if (shown >= history.columns.length) shown = 1;
  at("play").textContent = "❚❚";
  at("play").setAttribute("aria-label", "Pause");
  playing = setInterval(() => {
    shown = Math.min(shown + 1, history.columns.length);
    if (shown === history.columns.length) {
      stopPlaying();
      requestAnimationFrame(() => tree.follow());
    }
    refresh();
  }, FRAME);
  refresh();
}

function stopPlaying() {
  clearInterval(playing);
  playing = null;
  at("play").textContent = "▶";
  at("play").setAttribute("aria-label", "Play again from the start");
}

function scrub() {
  stopPlaying();
  shown = Number(at("scrub").value);
  live = shown === history.columns.length;
  refresh();
  requestAnimationFrame(() => tree.follow());
}

async function openFile() {
  const [file] = at("file").files;
  if (!file) return;
  giveUp();
  try {
    const opened = read(await file.text());
    reset();
    history = opened;
    certain = history.textsAt(history.columns.length)?.[history.selected] ?? "";
    say(`${file.name}: ${history.columns.length} cycles.`);
  } catch (error) {
    say(error.message, true);
  }
  at("file").value = "";
  refresh();
}

async function openRequest() {
  const id = at("request").value.trim();
  if (!id || running) return;
  reset();
  const mine = busy(new AbortController());
  say("Reading …");
  const events = [];
  try {
    for await (const event of eventsOf(id, { key: at("key").value, signal: mine.signal })) {
      events.push(event);
      if (!event.choice) take(history, event);
      refresh();
    }
    history = fromEvents(events);
    certain = history.textsAt(history.columns.length)?.[history.selected] ?? "";
    say(`${id}: ${history.columns.length} cycles.`);
  } catch (error) {
    if (running === mine) failed(error);
  }
  if (running === mine) busy(null);
  refresh();
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([written(history)], { type: "application/jsonl" }));
  link.download = `${at("request").value || "run"}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ------------------------------------------------------------------------------------------------ wiring

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  restyle();
}

function restyle() {
  tree.restyle();
  overview.redraw();
}

/** Shows all of the run, and there what was pointed at in its overview. */
function visit(event) {
  if (event.type === "pointermove" && !event.buttons) return;
  stopPlaying();
  live = true;
  const place = overview.placeOf(event.clientX);
  refresh();
  requestAnimationFrame(() => tree.goTo(place));
}

function tryExample({ target }) {
  at("prompt").value = target.textContent;
  send();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("model").addEventListener("change", describeModel);
at("key").addEventListener("change", fillModels);
at("theme").addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
for (const type of ["pointerdown", "pointermove"]) at("overview").addEventListener(type, visit);
for (const example of document.querySelectorAll(".example")) example.addEventListener("click", tryExample);
at("play").addEventListener("click", play);
at("scrub").addEventListener("input", scrub);
at("file").addEventListener("change", openFile);
at("by-id").addEventListener("submit", (event) => {
  event.preventDefault();
  openRequest();
});
at("save").addEventListener("click", save);
fillModels();
