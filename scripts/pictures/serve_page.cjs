// Asks the page in Chromium, and stores how it looks at the end:
//     node serve_page.cjs URL CHROMIUM FILE PROMPT SEED MAX_TOKENS

const { launch } = require("../../tests/server/page_tools.cjs");

const [url, executablePath, path, prompt, ...numbers] = process.argv.slice(2);

async function main() {
  const browser = await launch(executablePath);
  try {
    const page = await browser.newPage({ viewport: { width: 1280, height: 1400 }, colorScheme: "light" });
    page.setDefaultTimeout(600_000); // programs are compiled with the first request
    await page.goto(url);
    await page.waitForSelector("#model option", { state: "attached" });
    await page.evaluate(([seed, tokens]) => {
      document.querySelector("#seed").value = seed;
      document.querySelector("#max_tokens").value = tokens;
    }, numbers);
    await page.fill("#prompt", prompt);
    await page.press("#prompt", "Enter");
    await page.waitForFunction(() => document.querySelector("#stop").hidden);
    await frames(page);
    if (await page.isVisible("#overview")) {
      const { x, y, width, height } = await page.locator("#overview").boundingBox();
      await page.mouse.click(x + width / 4, y + height / 2);
    }
    await page.mouse.move(0, 0);
    await frames(page);
    await page.screenshot({ path });
  } finally {
    await browser.close();
  }
}

const frames = (page) =>
  page.evaluate(async () => {
    for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
  });

main().catch((error) => {
  console.error(String(error));
  process.exit(1);
});
