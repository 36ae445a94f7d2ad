// Measures how many frames a second the page draws of a long run, in headless Chromium, which draws on the CPU:
//     NODE_PATH=…/node_modules node scripts/measure_page.cjs [--particles 64] [--cycles 300] [--chromium /usr/bin/chromium]
//
// The page's own files are handed to the browser without a server. A frame is the time between two calls of
// requestAnimationFrame; 60 a second are the most. Four ways of asking for frames, each over the whole run:
//   live    every frame brings the event of a cycle, faster than any decoder
//   play    ▶, at the page's own pace
//   scrub   every frame shows one cycle more
//   scroll  every frame shows another part of the whole run
// The last line is JSON, each with frames, frames a second, and milliseconds of the median, the 95th percentile and the
// longest frame.

const fs = require("node:fs");
const path = require("node:path");
const { launch, longRun } = require("./page_tools.cjs");

const PAGE = path.join(__dirname, "..", "smcjax", "server", "page");
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml" };
const ORIGIN = "http://127.0.0.1:9";

const options = { particles: "64", cycles: "300", chromium: "/usr/bin/chromium" };
for (let i = 2; i < process.argv.length; i += 2) {
  const name = process.argv[i].replace(/^--/, "");
  if (!(name in options) || i + 1 === process.argv.length) {
    console.error(`measure_page: ${process.argv[i]} is no option with a value; use --particles, --cycles, --chromium`);
    process.exit(2);
  }
  options[name] = process.argv[i + 1];
}

async function main() {
  const [particles, cycles] = [Number(options.particles), Number(options.cycles)];
  const events = longRun({ particles, cycles });
  const browser = await launch(options.chromium);
  try {
    const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
    page.setDefaultTimeout(300_000);
    page.on("pageerror", (error) => console.error(error));
    await page.route("**/*", (route) => serve(route, events));
    await page.addInitScript(tools, cycles);
    await page.goto(ORIGIN);
    const measured = {};
    measured.live = await page.evaluate(() => measure.live());
    measured.play = await page.evaluate(() => measure.play());
    measured.scrub = await page.evaluate(() => measure.scrub());
    measured.scroll = await page.evaluate(() => measure.scroll());
    for (const [name, one] of Object.entries(measured)) {
      const [fps, ...ms] = [one.fps, one.median, one.p95, one.longest].map((value) => value.toFixed(1));
      console.log(`${name.padEnd(7)}${fps.padStart(6)} frames/s; ms: median ${ms[0]}, p95 ${ms[1]}, longest ${ms[2]}`);
    }
    console.log(JSON.stringify({ chromium: browser.version(), particles, cycles, ...measured }));
  } finally {
    await browser.close();
  }
}

function serve(route, events) {
  const { pathname } = new URL(route.request().url());
  if (pathname === "/v1/models") return route.fulfill({ json: { data: [] } });
  if (pathname.endsWith("/events")) {
    const body = [...events.map((event) => JSON.stringify(event)), "[DONE]"].map((data) => `data: ${data}\n\n`).join("");
    return route.fulfill({ contentType: "text/event-stream", body });
  }
  const file = path.join(PAGE, pathname === "/" ? "index.html" : path.basename(pathname));
  return route.fulfill({ contentType: TYPES[path.extname(file)], body: fs.readFileSync(file) });
}

/** In the page: the four ways, and a stream that brings one event a frame. */
function tools(cycles) {
  const at = (id) => document.getElementById(id);
  const frame = () => new Promise(requestAnimationFrame);

  const fetched = window.fetch;
  window.fetch = async (...wanted) => {
    const response = await fetched(...wanted);
    if (!String(wanted[0]).endsWith("/events")) return response;
    const events = (await response.text()).split("\n\n");
    const body = new ReadableStream({
      async pull(controller) {
        await frame();
        if (events.length) controller.enqueue(new TextEncoder().encode(`${events.shift()}\n\n`));
        else controller.close();
      },
    }, { highWaterMark: 0 });
    return new Response(body, { headers: response.headers });
  };

  /** Frames from now on until `ended()`, each begun by `act(number of the frame)`. */
  async function frames(ended, act = () => {}) {
    const times = [await frame()];
    while (!ended(times.length)) {
      act(times.length);
      times.push(await frame());
    }
    const each = times.slice(1).map((time, i) => time - times[i]);
    const sorted = [...each].sort((a, b) => a - b);
    const quantile = (q) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
    const seconds = (times.at(-1) - times[0]) / 1000;
    return { frames: each.length, fps: each.length / seconds, median: quantile(0.5), p95: quantile(0.95), longest: sorted.at(-1) };
  }

  window.measure = {
    live() {
      at("request").value = "x";
      at("by-id").requestSubmit();
      return frames(() => at("stop").hidden);
    },
    play() {
      at("play").click();
      return frames(() => at("play").textContent === "▶");
    },
    scrub() {
      return frames((count) => count > cycles, (count) => {
        at("scrub").value = String(count);
        at("scrub").dispatchEvent(new Event("input"));
      });
    },
    scroll() {
      const far = at("scroller").scrollWidth - at("scroller").clientWidth;
      return frames((count) => count > cycles, (count) => (at("scroller").scrollLeft = (far * count) / cycles));
    },
  };
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
