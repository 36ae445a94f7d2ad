// The server as the page sees it: its models, and streams of JSON objects.

/** An answer of the server that is none; the message is for people. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  // fetch takes no character beyond Latin-1 in a header, and the server reads UTF-8.
  if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an answer of this server but of something before it.
  }
  throw new Refused(response.status, message);
}

/** The virtual models, as /v1/models lists them. */
export async function listModels(key) {
  return (await (await ask("/v1/models", key)).json()).data;
}

/** Chunks of a streamed answer. */
export async function* answer(path, body, { key, signal }) {
  yield* objects(await ask(path, key, { method: "POST", body: JSON.stringify(body), signal }));
}

/** Events of a request that this server has kept; those to come too, where it still runs. */
export async function* eventsOf(id, { key, signal }) {
  yield* objects(await ask(`/v1/smc/requests/${encodeURIComponent(id)}/events`, key, { signal }));
}

async function* objects(response) {
  for await (const data of lines(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new Refused(response.status, value.error.message);
    yield value;
  }
}

/** The data of a stream of server-sent events, each a line here. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const all = (left + value).split("\n");
      left = all.pop();
      for (const line of all) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
