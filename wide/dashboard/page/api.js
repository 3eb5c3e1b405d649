// Requests, and the stream of what is new. The secret comes with the link, behind the #, and goes with each request; it
// is kept for this tab only.

const KEY = "wide.key";
const QUIET_MS = 6000; // a stream that says nothing for so long is dead: a laptop slept, or the network changed

// Is there a secret behind the #? Then it is taken from there, and not to be seen any more.
export function takeKey() {
  const link = new URLSearchParams(location.hash.replace(/^#\/?/, ""));
  if (!link.has("key")) return false;
  sessionStorage.setItem(KEY, link.get("key"));
  history.replaceState(null, "", `${location.pathname}#/overview`);
  return true;
}

takeKey();

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export class Trouble extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function answer(response) {
  if (response.ok) return response;
  let why = response.statusText;
  try { why = (await response.json()).error || why; } catch { /* not ours */ }
  throw new Trouble(why, response.status);
}

export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return (await answer(await fetch(`api${path}${query ? `?${query}` : ""}`, { headers: headers() }))).json();
}

export async function post(path, body = {}) {
  const given = { method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body) };
  return (await answer(await fetch(`api${path}`, given))).json();
}

// Calls `hear` with each message, and `lost` with what is wrong while there is no stream. Comes back by itself.
export async function listen(hear, lost) {
  for (let tries = 0; ; tries++) {
    const abort = new AbortController();
    let watch = 0;
    const alive = () => { clearTimeout(watch); watch = setTimeout(() => abort.abort(), QUIET_MS); };
    const woken = () => { if (document.visibilityState === "visible") alive(); };
    document.addEventListener("visibilitychange", woken);
    try {
      alive();
      const response = await answer(await fetch("api/stream", { headers: headers(), signal: abort.signal, cache: "no-store" }));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        alive();
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        for (const part of parts) if (part.startsWith("data: ")) { tries = 0; hear(JSON.parse(part.slice(6))); }
      }
      lost(null);
    } catch (error) {
      lost(error instanceof Trouble ? error : null);
    }
    clearTimeout(watch);
    document.removeEventListener("visibilitychange", woken);
    await new Promise((later) => setTimeout(later, Math.min(8000, 300 * 2 ** Math.min(tries, 5)) * (0.7 + 0.6 * Math.random())));
  }
}
