// What happened, the newest first; of one kind, about one node, or with these words.

import { get } from "./api.js";
import { day, element, tell } from "./words.js";

const WORRIES = { left: "warm", silent: "warm", rejected: "bad" };
const MOST = 500; // rows

export class Events {
  constructor(place, app) {
    this.app = app;
    this.events = [];
    this.kind = element("select", { "aria-label": "Kind of event", onchange: () => this.draw() });
    this.text = element("input", { type: "search", placeholder: "words, or a node", "aria-label": "Words to look for", oninput: () => this.draw() });
    this.body = element("tbody", {});
    this.count = element("span", { class: "quiet" });
    const head = element("tr", {}, ...["when", "what", "node", ""].map((text) => element("th", { class: "text", scope: "col", text })));
    place.replaceChildren(element("article", { class: "card whole" },
      element("header", {}, element("h2", { text: "What happened" }), element("span", { class: "grow" }), this.count, this.kind, this.text),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, element("table", {}, element("thead", {}, head), this.body))));
    this.heard = 0;
  }

  forget() { this.events = []; this.draw(); }

  async show() {
    try {
      this.events = (await get(`/runs/${encodeURIComponent(this.app.run)}/events`)).events;
    } catch (trouble) { tell(this.count, trouble.message); return; }
    const kinds = [...new Set(this.events.map((event) => event[2]))].sort();
    if (JSON.stringify(kinds) !== this.kinds) {
      this.kinds = JSON.stringify(kinds);
      const wish = this.kind.value;
      this.kind.replaceChildren(element("option", { value: "", text: "everything" }), ...kinds.map((kind) => element("option", { value: kind, text: kind })));
      this.kind.value = kinds.includes(wish) ? wish : "";
    }
    this.draw();
  }

  hear() { this.show(); }

  draw() {
    const words = this.text.value.trim().toLowerCase();
    const found = this.events.filter(([, , kind, node, text]) => (!this.kind.value || kind === this.kind.value)
      && (!words || `node ${node} ${text}`.toLowerCase().includes(words)));
    tell(this.count, `${found.length.toLocaleString("en")} of ${this.events.length.toLocaleString("en")}`);
    const shown = found.slice(0, MOST), print = JSON.stringify([shown[0]?.[0], shown.length, words, this.kind.value]);
    if (print === this.print) return;
    this.print = print;
    this.body.replaceChildren(...shown.map(([, at, kind, node, text]) => element("tr", {},
      element("td", { class: "text quiet", text: day(at) }), element("td", { class: `text ${WORRIES[kind] || ""}`, text: kind }),
      element("td", { class: "text", text: node === null ? "" : String(node) }), element("td", { class: "words", text }))));
  }
}
