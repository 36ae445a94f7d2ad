// Drives the page in Chromium and prints, as JSON in the last line, what was seen:
//     node page_in_browser.cjs URL CHROMIUM RUN_FILE TRACE_FILE
// The lines before it say how many more steps the server's engine may take, "steps 3", "steps none" or "steps all", and
// each is answered by a line: so what has to be seen while an answer comes is seen on a machine of any speed.

const { launch, longRun } = require("./page_tools.cjs");

const DEADLINE = 120_000; // milliseconds of whatever is waited for
const [url, executablePath, runFile, traceFile] = process.argv.slice(2);
const TAG = `<img src=x onerror="document.title='run'">`;

async function main() {
  const browser = await launch(executablePath);
  try {
    const page = await browser.newPage({ viewport: { width: 360, height: 780 } });
    const errors = [];
    const outside = [];
    const watched = async (page) => {
      page.setDefaultTimeout(DEADLINE);
      page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
      page.on("pageerror", (error) => errors.push(error.message));
      page.on("request", (request) => request.url().startsWith(url) || outside.push(request.url()));
      await page.goto(url);
    };
    await watched(page);
    await page.waitForSelector("#model option", { state: "attached" });
    const seen = { decoders: await page.locator("#model option").allTextContents() };
    seen.described = await page.textContent("#decoder");
    seen.focused = await page.evaluate(() => document.activeElement.id);
    seen.bundled = [await page.isVisible("#bundled")];
    await page.click("#more summary");
    seen.order = await tabbed(page);

    seen.live = await live(page);
    seen.law = await page.evaluate(law, seen.live.id);
    seen.aborted = await aborted(page);
    seen.controlled = await controlled(page);
    await asText(page, seen);
    seen.trace = await opened(page, traceFile);
    seen.replayed = await replayed(page, seen.live.id);
    seen.themes = await themes(page);
    seen.example = await example(page, seen);
    seen.heaviest = await heaviest(page);
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);

    const wide = () => browser.newPage({ viewport: { width: 1280, height: 900 } });
    seen.steered = await steered(await wide(), watched);
    seen.work = await work(await wide(), watched);

    seen.errors = [...errors];
    seen.outside = [...outside];
    // Controls: what was watched for is noticed where it happens.
    const lawless = await browser.newPage({ bypassCSP: true });
    await watched(lawless);
    await lawless.evaluate(() => fetch("http://127.0.0.2:9/").catch(() => {}));
    await page.evaluate((tag) => document.body.insertAdjacentHTML("beforeend", tag), TAG);
    await page.waitForFunction(() => [...document.images].some((image) => image.complete));
    await until(() => errors.length && outside.length);
    seen.controls = {
      errors: errors.length,
      outside: outside.length,
      images: await page.evaluate(() => document.images.length),
      title: await page.title(),
    };
    process.stdout.write(JSON.stringify(seen));
  } finally {
    await browser.close();
  }
}

const asking = []; // who waits for an answer to a line
process.stdin.on("data", (data) => {
  for (const character of String(data)) if (character === "\n") asking.shift()();
});

function steps(count) {
  return new Promise((resolve) => {
    asking.push(resolve);
    process.stdout.write(`steps ${count}\n`);
  });
}

async function until(holds) {
  const end = Date.now() + DEADLINE;
  while (!holds() && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
}

/** Waits until what has been asked for is shown: a frame shows it, and the next one draws it. */
const drawn = (page) =>
  page.evaluate(async () => {
    for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
  });

/** The ids that Tab reaches from the prompt on. */
async function tabbed(page) {
  const found = [];
  await page.focus("#prompt");
  for (let i = 0; i < 10; i++) {
    await page.keyboard.press("Tab");
    found.push(await page.evaluate(() => document.activeElement.id));
  }
  return found;
}

async function ask(page, prompt, tokens) {
  await page.fill("#max_tokens", String(tokens));
  await page.fill("#seed", "21");
  await page.fill("#prompt", prompt);
  await page.press("#prompt", "Enter");
}

const done = (page) => page.waitForFunction(() => document.querySelector("#stop").hidden);
const inked = () => {
  const canvas = document.querySelector("#tree");
  if (canvas.height === 0) return 0;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((value, i) => i % 4 === 3 && value > 0).length;
};

/**
 * An answer while it comes: the cycles that were shown before its engine was let run to the end, and what is there then.
 * Until five were shown, the engine takes a step for each that is.
 */
async function live(page) {
  const cycles = [];
  await page.exposeFunction("told", async (cycle) => {
    if (cycles.length === 5 || cycle === cycles.at(-1)) return; // a frame without a cycle writes the same text
    cycles.push(cycle);
    await steps(cycles.length === 5 ? "all" : 1);
  });
  await page.evaluate(() => {
    const at = document.querySelector("#fact-cycle");
    const note = () => at.textContent !== "–" && window.told(Number(at.textContent));
    new MutationObserver(note).observe(at, { childList: true, characterData: true, subtree: true });
  });
  const before = await page.evaluate(inked);
  await steps(3);
  await ask(page, "ab", 40);
  await done(page);
  await drawn(page);
  return {
    cycles,
    ink: [before, await page.evaluate(inked)],
    id: await page.inputValue("#request"),
    answer: await page.textContent("#certain"),
    marked: await page.locator("#texts li:first-child.selected .text").textContent(),
    chosen: await page.textContent("#chosen"),
    above: await page.evaluate(() => {
      const [answer, form] = ["#answer", "#form"].map((id) => document.querySelector(id));
      const size = (one) => parseFloat(getComputedStyle(one).fontSize);
      return [answer.getBoundingClientRect().bottom - form.getBoundingClientRect().top, size(answer) / size(form)];
    }),
    status: await page.textContent("#status"),
    label: await page.getAttribute("#tree", "aria-label"),
  };
}

/** The history that the page makes of events: its evidence, its texts; and of events of which one is missing. */
async function law(id) {
  const { eventsOf } = await import("/page/api.js");
  const { fromEvents } = await import("/page/stored.js");
  const events = [];
  for await (const event of eventsOf(id, {})) events.push(event);
  const told = (some) => {
    const history = fromEvents(some);
    const count = history.columns.length;
    const column = history.columns[count - 1];
    const alive = history.living(count).map((rows) => rows.reduce((a, b) => a + b, 0));
    return { evidence: column.evidence, ended: history.evidence, texts: column.rows, weights: history.weights, alive };
  };
  return { whole: told(events), gap: told(events.filter((event) => event.cycle !== 2)) };
}

/** The status after an answer was stopped that could not have ended. */
async function aborted(page) {
  await steps("none");
  await steps(6);
  await ask(page, "ab", 40);
  await page.waitForFunction(() => Number(document.querySelector("#fact-cycle").textContent) >= 2);
  await page.keyboard.press("Escape");
  await done(page);
  await steps("all");
  return page.textContent("#status");
}

/** What requests say of the control: none given, one given, and one given for an exact decoder; and the last's line. */
async function controlled(page) {
  const said = [];
  const note = (request) => request.method() === "POST" && said.push(request.postDataJSON().smc);
  page.on("request", note);
  const asked = async () => {
    await ask(page, "ab", 4);
    await done(page);
  };
  await asked();
  await page.fill("#control", "0.5");
  await asked();
  const names = await page.locator("#model option").allTextContents();
  await page.selectOption("#model", names.find((name) => name.includes("autoregressive")));
  const disabled = await page.isDisabled("#control");
  await asked();
  const chosen = await page.textContent("#chosen");
  await page.selectOption("#model", names[0]);
  await page.fill("#control", "");
  page.off("request", note);
  return { said, disabled, chosen };
}

/**
 * An answer that a potential steers, in a window that its run fits: what was asked, the values that were sent, and the
 * rows of pixels with marks, from the place of the highest value down. Then the rows on a page that draws no marks.
 */
async function steered(page, watched) {
  await watched(page);
  await page.waitForSelector("#potentials option", { state: "attached" });
  await page.click("#more summary");
  const offered = await page.locator("#potentials option").allTextContents();
  await page.selectOption("#potentials", "vowels");
  const asking = page.waitForRequest((request) => request.method() === "POST");
  await ask(page, "ab", 24);
  const said = (await asking).postDataJSON().smc;
  await done(page);
  await drawn(page);
  const values = await page.evaluate(async (id) => {
    const { eventsOf } = await import("/page/api.js");
    const found = [];
    for await (const event of eventsOf(id, {})) found.push(...(event.log_potentials ?? []));
    return found;
  }, await page.inputValue("#request"));
  const rows = await page.evaluate(marks);
  await page.evaluate(() => {
    const { fillRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
      if (height !== 2) fillRect.call(this, x, y, width, height);
    };
    document.querySelector("#scrub").dispatchEvent(new Event("input"));
  });
  await drawn(page);
  return { offered, said, values, rows, undrawn: await page.evaluate(marks) };
}

/** The middles of the rows of pixels that have ink in the lowest strip, below the place of the strip's highest value. */
function marks() {
  const [canvas, highest] = [document.querySelector("#tree"), 46];
  const { data } = canvas.getContext("2d").getImageData(0, canvas.height - 50, canvas.width, 40);
  const inked = (row) => {
    for (let i = 4 * canvas.width * row; i < 4 * canvas.width * (row + 1); i += 4) {
      if (data[i + 3] > 200 && data[i] + data[i + 1] + data[i + 2] < 150) return true;
    }
    return false;
  };
  return [...Array(40).keys()].filter(inked).map((row) => row + 0.5 - (50 - highest));
}

/** The first example of a server whose pair bears the bundled pair's name, clicked. */
async function example(page, seen) {
  await page.route("**/v1/models", renamed);
  await page.fill("#key", "k");
  await page.press("#key", "Tab");
  await page.waitForSelector("#bundled", { state: "visible" });
  seen.bundled.push(await page.locator("#bundled p").textContent());
  const contentType = "text/event-stream"; // the tests' pair has no room for an example
  await page.route("**/v1/*/completions", (route) => route.fulfill({ contentType, body: "data: [DONE]\n\n" }));
  const asking = page.waitForRequest((request) => request.method() === "POST");
  await page.locator(".example").first().click();
  const request = await asking;
  await done(page);
  return [await page.locator(".example").allTextContents(), request.postDataJSON()];
}

/** What stands beside the answer of a decoder that takes the heaviest particle: a server's stream, written here. */
async function heaviest(page) {
  const cycle = { cycle: 0, token_ids: [[1], [2]], texts: ["a", "b"], lengths: [1, 1], ancestors: [0, 1] };
  Object.assign(cycle, { finished: [true, true], resampled: false, ess: 1.6, log_weights: [0, 1.1] });
  const smc = { selected: 1, select: "best", particles: [{ text: "a", weight: 0.25 }, { text: "b", weight: 0.75 }] };
  const chunks = [
    { choices: [{ index: 0, text: "b" }], smc: { cycle } },
    { id: "r", choices: [{ index: 0, text: "", finish_reason: "stop" }], smc },
  ];
  const body = [...chunks.map((one) => JSON.stringify(one)), "[DONE]"].map((data) => `data: ${data}\n\n`).join("");
  await page.route("**/v1/**completions", (route) => route.fulfill({ contentType: "text/event-stream", body }));
  await ask(page, "ab", 4);
  await done(page);
  await drawn(page);
  return page.textContent("#chosen");
}

async function renamed(route) {
  const { data } = await (await route.fetch()).json();
  data[0].id = "bundled";
  await route.fulfill({ json: { object: "list", data } });
}

/** The whole of the run that is open: its label, the ink on its eighths, and where clicks on it lead. */
async function overview(page) {
  await drawn(page);
  const label = await page.getAttribute("#whole", "aria-label");
  const ink = await page.evaluate(() => {
    const canvas = document.querySelector("#whole");
    const pen = canvas.getContext("2d");
    const wide = Math.floor(canvas.width / 8);
    return [...Array(8).keys()].map((i) => pen.getImageData(i * wide, 0, wide, canvas.height).data.some(Boolean));
  });
  const box = await page.locator("#overview").boundingBox();
  const middles = [];
  for (const share of [0.25, 0.75]) {
    await page.mouse.click(box.x + share * box.width, box.y + box.height / 2);
    await drawn(page);
    const seen = await page.locator("#window").boundingBox();
    middles.push((seen.x + seen.width / 2 - box.x) / box.width);
  }
  return { label, ink, middles };
}

async function opened(page, file) {
  await page.locator(".stored").evaluate((details) => (details.open = true));
  await page.evaluate(() => (document.querySelector("#status").textContent = ""));
  await page.setInputFiles("#file", file);
  await page.waitForFunction(() => /cycles|damaged|no run/.test(document.querySelector("#status").textContent));
  await drawn(page);
  return {
    status: await page.textContent("#status"),
    answer: await page.textContent("#certain"),
    evidence: await page.textContent("#fact-evidence"),
    overview: await page.isVisible("#overview"),
    texts: await page.locator("#texts .text").allTextContents(),
  };
}

/** The page's paper and the colour that the canvas has most of, as the system, the button and the system again say. */
async function themes(page) {
  const told = async () => {
    await drawn(page);
    return page.evaluate(() => {
      const canvas = document.querySelector("#tree");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let [sum, count] = [0, 0];
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 255) continue;
        sum += data[i] + data[i + 1] + data[i + 2];
        count += 3;
      }
      return { body: getComputedStyle(document.body).backgroundColor, canvas: sum / count };
    });
  };
  const light = await told();
  await page.emulateMedia({ colorScheme: "dark" });
  const dark = await told();
  await page.click("#theme");
  const chosen = await told();
  await page.emulateMedia({ colorScheme: "light" });
  return { light, dark, chosen };
}

/** Markup in a prompt, in an error of the server and in the words of particles. */
async function asText(page, seen) {
  await page.locator(".modes label").nth(1).click();
  await ask(page, TAG, 4);
  await page.waitForFunction(() => document.querySelector("#stop").hidden);
  seen.turn = await page.textContent("#turns");
  seen.chat = await page.textContent("#status");
  seen.run = await opened(page, runFile);
  seen.images = await page.evaluate(() => document.images.length);
  seen.title = await page.title();
}

async function replayed(page, id) {
  await page.fill("#request", id);
  await page.click("#by-id button");
  await done(page);
  await drawn(page);
  const selected = await page.locator("#texts li.selected").count();
  await page.focus("#scrub");
  await page.keyboard.press("Home");
  await drawn(page);
  return { selected, first: await page.textContent("#fact-cycle"), answer: await page.textContent("#certain") };
}

/**
 * What a long run costs, at a third of it and at its end: calls of the canvas and changes of the document for one frame;
 * and how often the document is laid out for a frame. Then the same of a page with two mistakes: it draws all columns,
 * and it asks where the window is while it changes the document.
 */
async function work(page, watched) {
  await watched(page);
  const events = longRun({ particles: 64, cycles: 300 });
  const buffer = Buffer.from(events.map((event) => JSON.stringify(event)).join("\n"));
  await opened(page, { name: "long.jsonl", mimeType: "application/jsonl", buffer });
  const whole = await overview(page);
  const session = await page.context().newCDPSession(page);
  await session.send("Performance.enable");
  const layouts = async () => {
    const { metrics } = await session.send("Performance.getMetrics");
    return metrics.find(({ name }) => name === "LayoutCount").value;
  };
  await page.evaluate(counting);
  const told = async () => {
    const calls = await page.evaluate(async () => [await window.cost(100), await window.cost(300)]);
    const before = await layouts();
    await page.evaluate(async () => {
      for (let count = 201; count <= 240; count++) await window.scrubbed(count);
    });
    return { calls, layouts: ((await layouts()) - before) / 40 };
  };
  const found = await told();
  await page.evaluate(mistaken);
  return { ...found, whole, mistaken: await told() };
}

/** In the page: `scrubbed(count)` shows so many columns in a frame; `cost(count)` counts what is done for it. */
function counting() {
  let calls = 0;
  const pen = CanvasRenderingContext2D.prototype;
  for (const [name, { value }] of Object.entries(Object.getOwnPropertyDescriptors(pen))) {
    if (typeof value !== "function") continue;
    pen[name] = function (...given) {
      calls++;
      return value.apply(this, given);
    };
  }
  new MutationObserver((changes) => (calls += changes.length)).observe(document.body, {
    attributes: true,
    characterData: true,
    childList: true,
    subtree: true,
  });
  window.scrubbed = async (count) => {
    const scrub = document.querySelector("#scrub");
    scrub.value = String(count);
    scrub.dispatchEvent(new Event("input"));
    await new Promise(requestAnimationFrame);
  };
  const settled = async () => {
    for (let i = 0; i < 6; i++) await new Promise(requestAnimationFrame);
  };
  window.cost = async (count) => {
    await window.scrubbed(count - 1);
    await settled();
    calls = 0;
    await window.scrubbed(count);
    await settled();
    return calls;
  };
}

async function mistaken() {
  const { Tree } = await import("/page/tree.js");
  Tree.prototype._seen = function () {
    return [...Array(this.count).keys()];
  };
  const { show } = Tree.prototype;
  Tree.prototype.show = function (...given) {
    show.apply(this, given);
    this.asked = this.scroller.scrollLeft;
  };
}

main()
  .catch((error) => {
    console.error(error);
    process.exitCode = 1;
  })
  .finally(() => process.stdin.destroy());
