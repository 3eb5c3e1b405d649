// What travels, what codecs make of it, and what the coordinator and its nodes need to hold.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { element, number, percent, size } from "./words.js";

const EVERY_MS = 2000;

export class Network {
  constructor(place, app) {
    this.app = app;
    this.at = 0;
    const grid = element("div", { class: "grid" });
    place.replaceChildren(grid);
    const chart = (title, given = {}) => {
      const plot = element("div", { class: "small" });
      grid.append(element("article", { class: "card" }, element("header", {}, element("h2", { text: title })), plot));
      return new Chart(plot, { title, height: 230, ...given });
    };
    this.bytes = chart("Bytes a second", { fromZero: true, values: (value) => size(value) });
    this.ratio = chart("Compression ratio of updates", { values: (value) => (value === null ? "–" : `${number(value, 3)} ×`), legend: false });
    this.codec = chart("Time spent on codecs (s per s, all nodes)", { fromZero: true, legend: false });
    this.busy = chart("Coordinator's loop: how busy it was", { fromZero: true, values: percent, legend: false });
    this.turn = chart("Coordinator's loop: longest turn, ms", { fromZero: true, legend: false });
    this.memory = chart("Memory: the coordinator, and the eight busiest nodes", { fromZero: true, values: (value) => size(value) });
  }

  forget() { this.at = 0; }

  async show() {
    this.at = performance.now();
    let found;
    try { found = await get(`/runs/${encodeURIComponent(this.app.run)}/series`, { points: 300 }); } catch { return; }
    const x = found.seconds, pool = found.pool || {};
    const one = (name, y, given = {}) => (x.length && y ? [{ name, x, y, ...given }] : []);
    this.bytes.show([...one("sent by nodes", pool.bytes_sent_per_s), ...one("received by nodes", pool.bytes_received_per_s)], "seconds");
    this.ratio.show(one("ratio", pool.ratio), "seconds");
    this.codec.show(one("codecs", pool.codec_s_per_s), "seconds");
    this.busy.show(one("busy", pool.loop_busy, { fill: true }), "seconds");
    this.turn.show(one("longest turn", pool.loop_max_ms), "seconds");
    const memory = Object.entries(found.memory || {}).slice(0, 8).flatMap(([node, y]) => one(`node ${node}`, y));
    this.memory.show([...one("coordinator", pool.coordinator_rss_bytes), ...memory], "seconds");
  }

  hear() { if (performance.now() - this.at > EVERY_MS) this.show(); }
}
