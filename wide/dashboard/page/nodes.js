// Who is working: a row each, how work and speed are spread, and one node's history.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { clock, day, element, mbit, percent, rate, size, tell } from "./words.js";

const EVERY_MS = 3000;
export const SPENT = [["compute", "#009e73"], ["codec", "#e69f00"], ["travel", "#0072b2"], ["wait", "#bbbbbb"]];

export class Nodes {
  constructor(place, app) {
    this.app = app;
    this.at = 0;
    this.about = null;
    this.body = element("tbody", {});
    this.more = element("p", { class: "quiet" });
    this.left = element("tbody", {});
    this.leftCard = element("article", { class: "card whole", hidden: true }, element("header", {}, element("h2", { text: "Who has left" })),
      region("Who has left", element("table", {}, element("thead", {}, head(["node", "machine", "batches", "from", "until", "why", "strikes"])), this.left)));
    const keys = element("span", { class: "keys" }, ...SPENT.map(([name, colour]) => key(name, colour)));
    const speed = element("div", {}), share = element("div", {});
    this.share = share;
    this.detail = element("article", { class: "card whole", hidden: true, tabindex: -1 });
    place.replaceChildren(element("div", { class: "grid" },
      element("article", { class: "card whole" }, element("header", {}, element("h2", { text: "Nodes" }), element("span", { class: "grow" }), keys),
        region("Nodes", element("table", {}, element("thead", {}, head(["node", "machine", "device", "state", "batches/s", "share", "where its time goes", "up", "down", "codec", "memory", "stale", "strikes", ""])), this.body)), this.more),
      this.detail,
      element("article", { class: "card most" }, element("header", {}, element("h2", { text: "Throughput by node (stacked)" })), speed),
      element("article", { class: "card third" }, element("header", {}, element("h2", { text: "Batches by node" })), share),
      this.leftCard));
    this.speed = new Chart(speed, { title: "Throughput of each node, stacked", height: 280, stacked: true, values: (value) => rate(value) });
  }

  forget() { this.at = 0; this.about = null; this.detail.hidden = true; this.chosen = null; this.rows = null; }

  async show() {
    this.at = performance.now();
    const run = encodeURIComponent(this.app.run);
    try {
      const [about, series] = await Promise.all([get(`/runs/${run}`), get(`/runs/${run}/series`, { points: 240 })]);
      this.about = new Map(about.nodes.map((node) => [node.node, node]));
      const named = (node) => (this.about.has(Number(node)) ? `${node} ${this.about.get(Number(node)).name}` : node);
      this.speed.show(Object.entries(series.nodes).map(([node, y]) => ({ name: named(node), x: series.seconds, y })), "seconds");
      this.spread(about.nodes);
      this.tellLeft(about.nodes.filter((node) => !node.is_here));
      if (this.app.live) this.draw(this.app.live);
      if (this.chosen) this.history(this.chosen, false);
    } catch { /* the stream says what is wrong */ }
  }

  hear(live) {
    this.draw(live);
    if (performance.now() - this.at > EVERY_MS) this.show();
  }

  draw(live) {
    const nodes = live.state === "running" ? live.nodes || [] : [];
    const names = nodes.map((node) => node.node).join();
    if (names !== this.names) {
      this.names = names;
      this.rows = new Map(nodes.map((node) => [node.node, new Row(node, this)]));
      this.body.replaceChildren(...[...this.rows.values()].map((row) => row.line));
    }
    for (const node of nodes) this.rows.get(node.node)?.fill(node, this.about?.get(node.node));
    const others = (live.nodes_in_all ?? 0) - nodes.length;
    tell(this.more, live.state !== "running" ? "The run is over; no nodes are connected." : others > 0 ? `and ${others} more, which are less busy` : "");
  }

  spread(nodes) {
    const most = Math.max(1, ...nodes.map((node) => node.batches));
    const all = nodes.reduce((sum, node) => sum + node.batches, 0) || 1;
    this.share.className = "scroll";
    this.share.tabIndex = 0;
    this.share.setAttribute("role", "region");
    this.share.setAttribute("aria-label", "Batches by node");
    this.share.style.maxHeight = "280px";
    this.share.replaceChildren(element("table", {}, element("tbody", {}, ...nodes.slice(0, 64).map((node) => {
      const bar = element("i", {});
      bar.style.width = `${(100 * node.batches) / most}%`;
      bar.style.background = "#0072b2";
      return element("tr", {}, element("th", { class: "text cut", scope: "row", title: node.name, text: `${node.node} ${node.name}` }),
        element("td", {}, element("span", { class: "spent" }, bar)), element("td", { text: node.batches.toLocaleString("en") }), element("td", { text: percent(node.batches / all) }));
    }))));
  }

  tellLeft(nodes) {
    this.leftCard.hidden = !nodes.length;
    const print = JSON.stringify(nodes.map((node) => [node.node, node.left_at]));
    if (print === this.leftPrint) return;
    this.leftPrint = print;
    this.left.replaceChildren(...nodes.map((node) => element("tr", {}, element("td", { class: "text" }, this.opener(node.node, node.name)),
      element("td", { class: "text", text: node.host }), element("td", { text: node.batches.toLocaleString("en") }),
      element("td", { text: node.joined_at ? day(node.joined_at) : "–" }), element("td", { text: node.left_at ? day(node.left_at) : "–" }),
      element("td", { class: "words", text: node.why }), element("td", { text: strikes(node) }))));
  }

  opener(node, name) { return element("button", { type: "button", class: "link cut", title: name, text: `${node} ${name}`, onclick: () => this.history(node, true) }); }

  async history(node, isAsked) {
    this.chosen = node;
    let found;
    try { found = await get(`/runs/${encodeURIComponent(this.app.run)}/nodes/${node}`, { points: 240 }); } catch (trouble) { this.app.control.say(trouble.message); return; }
    if (this.chosen !== node) return;
    const about = this.about?.get(node);
    if (isAsked) this.openHistory(node, about);
    const { seconds: x, rates } = found, curve = (name, y, given = {}) => ({ name, x, y: y || [], ...given });
    if (x.length) {
      this.detailCharts[0].show([curve("batches/s", rates.batches)], "seconds");
      const part = (name) => rates[name].map((value) => Math.min(1, value));
      this.detailCharts[1].show([curve("compute", part("compute_s"), { colour: "#009e73" }), curve("codec", part("codec_s"), { colour: "#e69f00" }), curve("travel", part("travel_s"), { colour: "#0072b2" })], "seconds");
      this.detailCharts[2].show([curve("sent", rates.bytes_sent), curve("received", rates.bytes_received)], "seconds");
      this.detailCharts[3].show([curve("memory", rates.rss_bytes)], "seconds");
    }
    const rows = [...found.events.map(([at, kind, text]) => [at, kind, text]), ...found.rejects.map(([at, why, text]) => [at, `refused: ${why}`, text])].sort((a, b) => b[0] - a[0]);
    this.detailRows.replaceChildren(...rows.slice(0, 60).map(([at, kind, text]) => element("tr", {}, element("td", { class: "text quiet", text: clock(at) }), element("td", { class: "text", text: kind }), element("td", { class: "words", text }))));
  }

  openHistory(node, about) {
    for (const chart of this.detailCharts || []) chart.close();
    const plots = [0, 1, 2, 3].map(() => element("div", { class: "small" }));
    const titles = ["Batches a second", "Where its time goes", "Bytes a second", "Memory"];
    this.detailRows = element("tbody", {});
    const close = element("button", { type: "button", text: "Close", onclick: () => { this.chosen = null; this.detail.hidden = true; } });
    const reasons = Object.entries(about?.choices || {}).map(([role, [codec, why]]) => `${role}: ${codec} (${why})`).join("; ");
    this.detail.replaceChildren(element("header", {}, element("h2", { text: `Node ${node} ${about?.name || ""}` }), element("span", { class: "quiet", text: about?.build || "" }), element("span", { class: "grow" }), close),
      element("p", { class: "quiet", text: reasons ? `Codecs: ${reasons}` : "" }),
      element("div", { class: "grid" }, ...plots.map((plot, i) => element("div", { class: "card" }, element("header", {}, element("h2", { text: titles[i] })), plot))),
      region("What happened to it", element("table", {}, this.detailRows)));
    this.detail.hidden = false;
    this.detailCharts = plots.map((plot, i) => new Chart(plot, { title: titles[i], height: 200, fromZero: true, values: i > 1 ? (value) => size(value) : i === 1 ? percent : (value) => rate(value), legend: i === 1 || i === 2 }));
    this.detail.scrollIntoView({ block: "nearest" });
    this.detail.focus({ preventScroll: true });
  }
}

class Row {
  constructor(node, page) {
    this.page = page;
    const cell = (kind = "") => element("td", { class: kind });
    this.name = page.opener(node.node, node.name);
    this.cells = [cell("text"), cell("text"), cell("text"), cell("text"), cell(), cell(), cell(), cell(), cell(), cell("text"), cell(), cell(), cell(), cell()];
    this.cells[0].append(this.name);
    this.parts = SPENT.map(([, colour]) => { const part = element("i", {}); part.style.background = colour; return part; });
    this.spent = element("span", { class: "spent", role: "img" }, ...this.parts);
    this.cells[6].append(this.spent);
    this.drop = element("button", { type: "button", class: "danger", text: "Drop", "aria-label": `Drop node ${node.node}`, onclick: () => page.app.control.drop(node.node, node.name) });
    this.cells[13].append(this.drop);
    this.line = element("tr", {}, ...this.cells);
  }

  fill(node, about) {
    const say = (i, text, title = "") => { tell(this.cells[i], text); if (title) this.cells[i].title = title; };
    say(1, node.host); say(2, node.device || "–", about?.build || ""); say(3, node.state); say(4, rate(node.batches_per_s), `could do ${rate(node.computes_per_s)}`);
    this.cells[3].className = `text ${node.state === "silent" ? "bad" : node.state === "computes" ? "good" : "quiet"}`;
    say(5, percent(node.share));
    node.wait = Math.max(0, 1 - node.compute - node.codec - node.travel); // also what it waits for right now
    SPENT.forEach(([name], i) => { this.parts[i].style.width = `${100 * node[name]}%`; });
    this.spent.setAttribute("aria-label", SPENT.map(([name]) => `${name} ${percent(node[name])}`).join(", "));
    this.spent.title = this.spent.getAttribute("aria-label");
    say(7, mbit(node.up)); say(8, mbit(node.down));
    const codecs = [...new Set(Object.entries(node.codecs).filter(([role]) => role !== "batch").map(([, codec]) => codec))].join("+");
    say(9, codecs || "–", Object.entries(about?.choices || {}).map(([role, [codec, why]]) => `${role}: ${codec}, ${why}`).join("\n"));
    say(10, size(node.rss_bytes)); say(11, String(node.staleness)); say(12, about ? strikes(about) : "–", about ? JSON.stringify(about.strikes) : "");
    this.drop.hidden = !this.page.app.control.may;
  }
}

const strikes = (node) => String(Object.values(node.strikes).reduce((sum, count) => sum + count, 0));
const TEXT = new Set(["node", "machine", "device", "state", "codec", "why"]);
const head = (titles) => element("tr", {}, ...titles.map((text) => element("th", { class: TEXT.has(text) ? "text" : "", scope: "col", text })));
const region = (label, table) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
export function key(name, colour) {
  const box = element("i", {});
  box.style.background = colour;
  return element("span", { class: "key" }, box, name);
}
