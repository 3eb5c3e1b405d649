// The lease timeline: one row for each node, time from left to right. What is near is drawn lease by lease; from afar
// the server sums up, for each column of pixels, how that moment was spent. A stretch three times as wide as the screen
// is at hand, so that panning only moves what is there.

import { get } from "./api.js";
import { key } from "./nodes.js";
import { Lanes } from "./lanes.js";
import { day, duration, element, number, tell } from "./words.js";

const ROWS = 40;
const LEAST_S = 1e-4;
const MOST_COLUMNS = 6000;
const SETTLE_MS = 90;

export class Timeline {
  constructor(place, app) {
    this.app = app;
    this.view = null; // {from, to}, in seconds after the first lease
    this.row = 0;
    this.follows = true; // what is new, as long as something is
    this.width = 30; // seconds, while it follows
    this.canvas = element("canvas", { tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": "Lease timeline. Arrow keys pan, plus and minus zoom, comma and full stop step from lease to lease." });
    this.canvas.style.height = "200px";
    this.tip = element("div", { class: "tip", hidden: true });
    this.keys = element("div", { class: "keys" });
    this.hint = element("p", { class: "quiet", text: "Click a lease, or step from one to the next with the , and . keys, to see what it was." });
    this.about = element("div", { class: "lease", "aria-live": "polite" }, this.hint);
    this.where = element("span", { class: "quiet" });
    const button = (text, label, call) => element("button", { type: "button", text, "aria-label": label, title: label, onclick: call });
    this.liveButton = element("button", { type: "button", text: "Live", "aria-pressed": "true", onclick: () => this.follow(!this.follows) });
    this.pager = element("span", { class: "tools", hidden: true }, button("▲", "Nodes before", () => this.turnPage(-1)), this.rowsText = element("span", { class: "quiet" }), button("▼", "Nodes after", () => this.turnPage(1)));
    place.replaceChildren(element("article", { class: "card whole" },
      element("header", {}, element("h2", { text: "Lease timeline" }), this.where, element("span", { class: "grow" }), this.pager,
        element("span", { class: "tools" }, button("◀", "Earlier", () => this.pan(-0.5)), button("▶", "Later", () => this.pan(0.5)), button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)), button("All", "The whole run", () => this.all()), this.liveButton)),
      element("div", { class: "lanes" }, this.canvas, this.tip), this.keys),
    element("article", { class: "card whole" }, element("header", {}, element("h2", { text: "Lease" })), this.about));
    this.lanes = new Lanes(this.canvas);
    this.canvas.timeline = this; // for whoever inspects the page
    this.listenToHands();
    new ResizeObserver(() => this.touch()).observe(this.canvas);
  }

  forget() { this.view = null; this.tile = null; this.row = 0; this.follows = true; this.chosen = null; this.lanes.tile = null; this.about.replaceChildren(this.hint); }
  redraw() { this.touch(); }

  async show() { await this.load(); }

  hear(live) {
    this.liveButton.disabled = live.state !== "running";
    if (this.follows && live.state !== "running" && this.view) this.follow(false);
    if (this.follows && live.state === "running") this.load();
    else if (!this.tile) this.load();
  }

  // ── where we look ──────────────────────────────────────────────────────────────────────────────────────────────

  follow(isOn) {
    this.follows = isOn && this.app.live?.state === "running";
    isOn = this.follows;
    this.liveButton.setAttribute("aria-pressed", String(isOn));
    if (isOn) this.load();
  }

  look(from, to) {
    const width = Math.max(LEAST_S, to - from);
    this.view = { from, to: from + width };
    this.follow(false);
    this.touch();
    this.soon();
  }

  pan(part) { if (this.view) { const by = part * (this.view.to - this.view.from); this.look(this.view.from + by, this.view.to + by); } }

  zoom(factor, at = null) {
    if (!this.view) return;
    const { from, to } = this.view, middle = at ?? (from + to) / 2;
    this.width = Math.max(LEAST_S, (to - from) * factor);
    if (this.follows && at === null) { this.load(); return; }
    this.look(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  all() { if (this.tile) this.look(0, Math.max(LEAST_S, this.tile.ended_s)); }
  turnPage(by) { this.row = Math.max(0, Math.min(this.row + by * ROWS, Math.max(0, (this.tile?.nodes_in_all ?? 0) - 1))); this.load(); }
  soon() { clearTimeout(this.timer); this.timer = setTimeout(() => this.load(), SETTLE_MS); }

  // ── what is there ──────────────────────────────────────────────────────────────────────────────────────────────

  // One question at a time; if we have moved meanwhile, another one.
  async load() {
    if (this.isAsking) { this.asksAgain = true; return; }
    this.isAsking = true;
    try {
      do {
        this.asksAgain = false;
        await this.ask();
      } while (this.asksAgain);
    } catch (trouble) { tell(this.where, trouble.message); }
    this.isAsking = false;
  }

  async ask() {
    const run = this.app.run, path = `/runs/${encodeURIComponent(run)}/timeline`;
    const isLive = this.follows && this.app.live?.state === "running";
    const pixels = Math.max(200, Math.round(this.lanes.room * devicePixelRatio));
    const frame = (times) => ({ columns: Math.min(MOST_COLUMNS, times * pixels), row: this.row, rows: ROWS });
    let tile;
    if (isLive) {
      tile = await get(path, { last: 2 * this.width, ...frame(2) });
      this.view = { from: Math.max(0, tile.last_s - this.width), to: Math.max(tile.last_s, Math.min(this.width, 1)) };
    } else if (!this.view) {
      tile = await get(path, frame(1));
      this.view = { from: 0, to: Math.max(LEAST_S, tile.ended_s) };
      this.follow(false);
    } else {
      const { from, to } = this.view, width = to - from;
      tile = await get(path, { from: from - width, to: to + width, ...frame(3) });
    }
    if (run !== this.app.run) return;
    if (tile.png) {
      tile.image = new Image();
      tile.image.src = tile.png;
      await tile.image.decode();
    }
    this.tile = tile;
    this.lanes.use(tile);
    this.tellFrame();
    this.touch();
  }

  tellFrame() {
    const tile = this.tile, { from, to } = this.view;
    const what = tile.bars ? "each bar is a lease" : "summed up: zoom in to see single leases";
    tell(this.where, tile.leases ? `${tile.leases.toLocaleString("en")} lease${tile.leases === 1 ? "" : "s"} in all · ${duration(to - from)} in view · ${what}` : "no leases yet");
    this.pager.hidden = tile.nodes_in_all <= ROWS;
    tell(this.rowsText, `${this.row + 1}–${Math.min(this.row + ROWS, tile.nodes_in_all)} of ${tile.nodes_in_all} nodes`);
    if (!this.keys.childElementCount) this.keys.replaceChildren(...Object.values(tile.kinds).map(([colour, words]) => key(words, colour)), key("| a version", "transparent"), key("✕ a node left", "transparent"));
    this.canvas.dataset.mode = tile.bars ? "bars" : "picture";
  }

  touch() {
    if (this.isDirty) return;
    this.isDirty = true;
    requestAnimationFrame(() => {
      this.isDirty = false;
      if (this.view) this.lanes.draw(this.view, this.chosen);
    });
  }

  // ── hands ──────────────────────────────────────────────────────────────────────────────────────────────────────

  listenToHands() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, y: event.offsetY, view: this.view, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag || !drag.view) { this.point(event.offsetX, event.offsetY); return; }
      const by = ((drag.x - event.offsetX) / this.lanes.room) * (drag.view.to - drag.view.from);
      if (!drag.moved && Math.abs(event.offsetX - drag.x) < 4) return;
      drag.moved = true;
      this.look(drag.view.from + by, drag.view.to + by);
    });
    canvas.addEventListener("pointerup", (event) => { if (drag && !drag.moved) this.click(event.offsetX, event.offsetY); drag = null; });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      const isMine = event.ctrlKey || event.shiftKey || document.activeElement === canvas;
      if (!isMine || !this.view) return;
      event.preventDefault();
      if (event.shiftKey) this.pan((event.deltaY + event.deltaX) / 600);
      else this.zoom(Math.exp(event.deltaY / 300), this.lanes.timeAt(event.offsetX, this.view));
    }, { passive: false });
    const KEYS = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.all(), End: () => this.follow(true), ",": () => this.step(-1), ".": () => this.step(1), PageUp: () => this.turnPage(-1), PageDown: () => this.turnPage(1) };
    canvas.addEventListener("keydown", (event) => { if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); } });
  }

  point(x, y) {
    const found = this.view && this.lanes.at(x, y, this.view);
    this.tip.hidden = !found;
    if (!found) return;
    tell(this.tip, found.bar !== undefined ? this.inShort(found.bar) : found.words);
    const room = this.canvas.clientWidth;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, room - 250))}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  click(x, y) {
    const found = this.view && this.lanes.at(x, y, this.view);
    if (found?.bar !== undefined) this.choose(found.bar);
    else if (this.tile && !this.tile.bars) this.zoom(0.2, this.lanes.timeAt(x, this.view));
  }

  step(by) {
    const bars = this.tile?.bars;
    if (!bars?.lease.length) return;
    const now = bars.lease.indexOf(this.chosen);
    const next = now < 0 ? bars.at_s.findIndex((at) => at[0] >= this.view.from) : now + by;
    this.choose(Math.max(0, Math.min(next, bars.lease.length - 1)));
    const at = bars.at_s[bars.lease.indexOf(this.chosen)], { from, to } = this.view;
    if (at[6] < from || at[0] > to) this.look(at[0] - (to - from) / 2, at[0] + (to - from) / 2);
  }

  inShort(i) {
    const bars = this.tile.bars, at = bars.at_s[i];
    const last = bars.first_batch[i] + bars.batches[i] - 1;
    const batches = bars.batches[i] === 1 ? `batch ${last}` : `batches ${bars.first_batch[i]}–${last}`;
    const lines = [`node ${bars.node[i]}, lease ${bars.lease[i]}: step ${bars.step[i]}, ${batches}`, `${duration(at[6] - at[0])}, loss ${number(bars.loss[i])}, ${bars.codec[i]}`];
    if (bars.refused[i]) lines.push(`did not count: ${bars.refused[i]}`);
    return lines.join("\n");
  }

  choose(i) {
    const bars = this.tile.bars, at = bars.at_s[i];
    this.chosen = bars.lease[i];
    const parts = this.tile.parts.map((name, part) => [name, duration(at[part + 1] - at[part])]);
    const rows = [["granted", day(this.tile.origin + at[0])], ["version", bars.version[i] < 0 ? `none: ${bars.refused[i]}` : String(bars.version[i])], ["codec", bars.codec[i]], ["loss", number(bars.loss[i])], ...parts];
    this.about.replaceChildren(element("strong", { text: this.inShort(i).split("\n")[0] }), element("dl", {}, ...rows.map(([name, text]) => element("div", {}, element("dt", { text: name }), element("dd", { text })))));
    this.touch();
  }
}
