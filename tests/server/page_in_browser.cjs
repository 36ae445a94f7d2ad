// Drives the page in Chromium and prints, as JSON, what was seen:
//     node page_in_browser.cjs URL CHROMIUM RUN_FILE TRACE_FILE

const { chromium } = require("playwright-core");

const [url, executablePath, runFile, traceFile] = process.argv.slice(2);
const TAG = `<img src=x onerror="document.title='run'">`;

async function main() {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage({ viewport: { width: 360, height: 780 } });
    const errors = [];
    const outside = [];
    const watched = async (page) => {
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
    seen.order = await tabbed(page);

    seen.live = await live(page);
    seen.law = await page.evaluate(law, seen.live.id);
    seen.aborted = await aborted(page);
    await asText(page, seen);
    seen.trace = await opened(page, traceFile);
    seen.replayed = await replayed(page, seen.live.id);
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);

    seen.errors = [...errors];
    seen.outside = [...outside];
    // Controls: what was watched for is noticed where it happens.
    const lawless = await browser.newPage({ bypassCSP: true });
    await watched(lawless);
    await lawless.evaluate(() => fetch("http://127.0.0.2:9/").catch(() => {}));
    await page.evaluate((tag) => document.body.insertAdjacentHTML("beforeend", tag), TAG);
    await page.waitForTimeout(200);
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

/** The ids that Tab reaches from the prompt on. */
async function tabbed(page) {
  const found = [];
  await page.focus("#prompt");
  for (let i = 0; i < 7; i++) {
    await page.keyboard.press("Tab");
    found.push(await page.evaluate(() => document.activeElement.id));
  }
  return found;
}

async function ask(page, prompt, tokens) {
  await page.fill("#max_tokens", String(tokens));
  await page.fill("#seed", "9");
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

/** An answer while it comes: the cycles that were shown, and what is there at the end. */
async function live(page) {
  await page.evaluate(() => {
    window.cycles = [];
    const at = document.querySelector("#fact-cycle");
    const note = () => window.cycles.push([Number(at.textContent), !document.querySelector("#stop").hidden]);
    new MutationObserver(note).observe(at, { childList: true, characterData: true, subtree: true });
  });
  const before = await page.evaluate(inked);
  await ask(page, "ab", 40);
  await page.waitForFunction(() => !document.querySelector("#stop").hidden);
  await done(page);
  await page.waitForTimeout(150);
  return {
    cycles: await page.evaluate(() => window.cycles.filter(([cycle, running]) => running && cycle >= 0).map(([cycle]) => cycle)),
    ink: [before, await page.evaluate(inked)],
    id: await page.inputValue("#request"),
    answer: await page.textContent("#certain"),
    marked: await page.locator("#texts li.selected .text").textContent(),
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

async function aborted(page) {
  await ask(page, "ab", 40);
  await page.waitForFunction(() => Number(document.querySelector("#fact-cycle").textContent) >= 2);
  await page.keyboard.press("Escape");
  await done(page);
  return page.textContent("#status");
}

async function opened(page, file) {
  await page.locator(".stored").evaluate((details) => (details.open = true));
  await page.setInputFiles("#file", file);
  await page.waitForFunction(() => /cycles|damaged|no run/.test(document.querySelector("#status").textContent));
  await page.waitForTimeout(150);
  return {
    status: await page.textContent("#status"),
    answer: await page.textContent("#certain"),
    evidence: await page.textContent("#fact-evidence"),
    texts: await page.locator("#texts .text").allTextContents(),
  };
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
  await page.waitForTimeout(150);
  const selected = await page.locator("#texts li.selected").count();
  await page.focus("#scrub");
  await page.keyboard.press("Home");
  await page.waitForTimeout(150);
  return { selected, first: await page.textContent("#fact-cycle"), answer: await page.textContent("#certain") };
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
