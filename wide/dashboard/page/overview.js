// Is it learning, how far is it, and what is in the way.

import { get } from "./api.js";
import { Chart, smoothed } from "./charts.js";
import { day, duration, element, number, percent, rate, tell } from "./words.js";

const AXES = { step: "step", samples: "samples", seconds: "seconds" };
const POINTS = 1200;

function card(kind, title, ...children) {
  return element("article", { class: `card ${kind}` }, element("header", {}, element("h2", { text: title })), ...children);
}

function figure(title) {
  const large = element("div", { class: "figure", text: "–" }), under = element("div", { class: "under" });
  return { card: card("quarter", title, large, under), large, under };
}

export class Overview {
  constructor(place, app) {
    this.app = app;
    this.axis = "step";
    this.smooth = 0;
    this.curves = new Map(); // by run
    this.also = new Set(); // runs to compare with
    this.metrics = new Map(); // charts, by name
    this.progress = figure("Progress");
    this.bar = element("progress", { max: 1, value: 0, "aria-label": "Progress" });
    this.progress.large.after(this.bar);
    this.loss = figure("Loss");
    this.speed = figure("Speed");
    this.pool = figure("Nodes");
    for (const one of [this.progress, this.speed]) one.card.classList.add("bar");
    this.gauge = element("progress", { max: 1, value: 0, "aria-label": "Part of what the nodes could do together" });
    this.speed.large.after(this.gauge);
    this.why = element("div", {});
    this.whyCard = element("article", { class: "card whole why" }, element("h2", { text: "Why is it slow?" }), this.why);
    const plot = element("div", {});
    this.lossCard = card("whole", "Training loss", plot);
    this.lossCard.firstChild.append(element("span", { class: "grow" }), this.tools());
    this.rest = element("div", { class: "grid", id: "metrics" });
    this.about = element("div", {});
    place.replaceChildren(element("div", { class: "grid" },
      this.progress.card, this.loss.card, this.speed.card, this.pool.card, this.whyCard, this.lossCard),
    this.rest, element("div", { class: "grid" }, card("whole", "How it was started", this.about)));
    this.chart = new Chart(plot, { title: "Training loss", height: 330, looked: (from, to) => this.look(from, to) });
  }

  tools() {
    const axes = Object.keys(AXES).map((axis) => element("button", {
      type: "button", "aria-pressed": String(axis === this.axis), text: axis === "seconds" ? "time" : axis,
      onclick: (event) => { this.axis = axis; this.press(event.target); this.chart.zoom = null; this.look(null, null); },
    }));
    const log = element("button", { type: "button", "aria-pressed": "false", text: "log", onclick: (event) => {
      const isOn = event.target.getAttribute("aria-pressed") !== "true";
      event.target.setAttribute("aria-pressed", String(isOn));
      this.chart.setLog(isOn);
    } });
    const smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: (event) => {
      this.smooth = Number(event.target.value); this.draw();
    } });
    this.reset = element("button", { type: "button", text: "reset zoom", hidden: true, onclick: () => {
      this.chart.zoom = null; this.look(null, null);
    } });
    this.others = element("span", { class: "tools" });
    this.axesButtons = axes;
    return element("div", { class: "tools" }, this.others, ...axes, log, element("label", {}, "smooth", smooth), this.reset);
  }

  press(button) { for (const other of this.axesButtons) other.setAttribute("aria-pressed", String(other === button)); }

  forget() {
    this.also.clear();
    this.chart.zoom = null;
    for (const { chart, card: place } of this.metrics.values()) { chart.close(); place.remove(); }
    this.metrics.clear();
    this.whyText = null;
  }

  async show() {
    this.chooseOthers();
    await Promise.all([this.app.run, ...this.also].map((run) => this.load(run)));
    this.draw();
    try {
      this.tellAbout(await get(`/runs/${encodeURIComponent(this.app.run)}`));
    } catch (trouble) { tell(this.about, trouble.message); }
  }

  chooseOthers() {
    const names = this.app.server.runs.filter((name) => name !== this.app.run);
    this.others.replaceChildren(...names.map((name) => {
      const box = element("input", { type: "checkbox", onchange: async (event) => {
        if (event.target.checked) { this.also.add(name); await this.load(name); } else this.also.delete(name);
        this.draw();
      } });
      box.checked = this.also.has(name);
      return element("label", {}, box, name);
    }));
  }

  async load(run, from = null, to = null) {
    try {
      this.curves.set(run, await get(`/runs/${encodeURIComponent(run)}/curves`, { points: POINTS, from, to }));
    } catch { /* what was seen before stays */ }
  }

  // Somebody looks closer: between these two, there is more to see.
  async look(from, to) {
    this.reset.hidden = from === null;
    if (this.axis !== "step" && from !== null) return;
    await Promise.all([this.app.run, ...this.also].map((run) => this.load(run, from, to)));
    this.draw();
  }

  // What was trained since the last message; if one was missed, all of it is asked for again.
  learn(told, isNext) {
    const known = this.curves.get(told.run);
    if (!known || !told.losses?.length) return;
    if (!isNext) { if (told.run === this.app.run || this.also.has(told.run)) this.load(told.run).then(() => this.draw()); return; }
    if (this.chart.zoom) return;
    const { losses } = known;
    for (const [step, samples, seconds, loss] of told.losses) {
      if (losses.step.length && step <= losses.step[losses.step.length - 1]) continue;
      for (const [name, value] of Object.entries({ step, samples, seconds, loss, low: loss, high: loss })) losses[name].push(value);
    }
    if (losses.step.length > 3 * POINTS) this.load(told.run);
    const names = Object.keys(told.metrics || {});
    if (names.length && (this.metricsSeen !== JSON.stringify(told.metrics))) {
      this.metricsSeen = JSON.stringify(told.metrics);
      this.load(told.run).then(() => this.draw());
    }
  }

  hear(live) {
    this.tellFigures(live);
    this.tellWhy(live);
    if (this.app.shown === "overview") this.draw();
  }

  tellFigures(live) {
    const { progress, loss, speed, pool } = this;
    const steps = live.steps ? ` / ${live.steps.toLocaleString("en")}` : "";
    progress.large.replaceChildren(`${(live.step ?? 0).toLocaleString("en")}`, element("small", { text: `${steps} steps` }));
    const parts = [live.steps ? live.step / live.steps : 0, live.seconds_limit ? live.elapsed_s / live.seconds_limit : 0];
    this.bar.value = Math.min(1, Math.max(...parts));
    const between = live.left_between ? ` (${duration(live.left_between[0])} – ${duration(live.left_between[1])})` : "";
    const isGoing = live.state === "running";
    const left = live.is_paused ? "paused" : isGoing && live.left_s !== null && live.left_s !== undefined ? `${duration(live.left_s)} left${between}` : isGoing ? `${duration(live.elapsed_s)} so far` : `took ${duration(live.elapsed_s)}`;
    tell(progress.under, `epoch ${(live.epoch ?? 0) + 1} · ${left}`);
    tell(loss.large, number(live.loss));
    const metrics = Object.entries(live.metrics || {}).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
    tell(loss.under, metrics || "of the last step");
    speed.large.replaceChildren(live.is_paused ? "–" : rate(live.batches_per_s), element("small", { text: " batches/s" }));
    const isKnown = isGoing && !live.is_paused && live.used !== null && live.used !== undefined;
    this.gauge.classList.toggle("away", !isKnown);
    this.gauge.value = isKnown ? live.used : 0;
    tell(speed.under, isKnown ? `${percent(live.used)} of the ${rate(live.possible)} its nodes could do` : isGoing ? "" : "over the whole run");
    const there = isGoing ? (live.nodes_in_all ?? 0) - (live.nodes_silent ?? 0) : this.took ?? 0;
    pool.large.replaceChildren(String(there), element("small", { text: live.nodes_silent ? ` and ${live.nodes_silent} silent` : "" }));
    const machines = new Set((live.nodes || []).map((node) => node.host)).size;
    tell(pool.under, !isGoing ? "took part" : there ? `on ${machines} machine${machines === 1 ? "" : "s"}` : `nobody has joined yet${live.is_served ? ": wide invite RUN" : ""}`);
  }

  tellWhy(live) {
    const isGoing = live.state === "running";
    const lines = !isGoing ? [live.why || live.state] : live.why_slow?.length ? live.why_slow : [live.verdict || "Too early to tell."];
    const isWell = isGoing && !live.why_slow?.length && /^all is well/.test(live.verdict || "");
    const title = live.is_paused ? "Paused" : live.state === "running" ? "Why is it slow?" : live.state === "done" ? "Finished" : live.state === "failed" ? "Why it failed" : "How it ended";
    tell(this.whyCard.firstChild, isWell ? "How it goes" : title);
    this.whyCard.className = `card whole why ${live.state === "failed" ? "bad" : isWell ? "good" : live.why_slow?.length || live.is_paused ? "warm" : ""}`;
    const text = lines.join("\n");
    if (text === this.whyText) return;
    this.whyText = text;
    this.why.replaceChildren(lines.length === 1 ? element("p", { text: lines[0] }) : element("ul", {}, ...lines.map((line) => element("li", { text: line }))));
  }

  draw() {
    const runs = [this.app.run, ...this.also].filter((run) => this.curves.has(run));
    const curves = runs.flatMap((run) => {
      const { losses } = this.curves.get(run), name = runs.length > 1 ? run : "loss";
      const curve = { name, x: losses[this.axis], y: smoothed(losses.loss, this.smooth) };
      const isBand = runs.length === 1 && losses.low.some((low, i) => low !== losses.high[i]);
      const edge = (side, y) => ({ name: side, x: losses[this.axis], y, edge: true, colour: "#56b4e9" });
      const band = isBand ? [edge("most", losses.high), edge("least", losses.low)] : [];
      return [...(curve.x.length ? [curve] : []), ...band];
    });
    this.chart.show(curves, this.axis === "seconds" ? "seconds of training" : this.axis);
    this.drawMetrics(runs);
  }

  drawMetrics(runs) {
    const names = new Set(runs.flatMap((run) => Object.keys(this.curves.get(run).evaluations)));
    for (const name of names) {
      if (!this.metrics.has(name)) {
        const plot = element("div", { class: "small" });
        const place = card("third", name, plot);
        this.rest.append(place);
        this.metrics.set(name, { card: place, chart: new Chart(plot, { title: name, height: 200, legend: this.app.server.runs.length > 1 }) });
      }
      this.metrics.get(name).chart.show(runs.filter((run) => this.curves.get(run).evaluations[name]).map((run) => {
        const found = this.curves.get(run).evaluations[name];
        return { name: run, x: found[this.axis], y: found.value };
      }), "");
    }
  }

  tellAbout(about) {
    this.took = about.nodes_in_all;
    if (this.app.live) this.tellFigures(this.app.live);
    const rows = [["folder", about.folder], ["started", about.began_at ? `${day(about.began_at)}${about.sessions > 1 ? `, ${about.sessions} times in all` : ""}` : "–"],
      ["command", about.command.join(" ")], ...Object.entries(about.given), ["weights", about.weights_sha256 || "not saved yet"], ["how it ended", about.why]];
    this.about.className = "scroll";
    this.about.tabIndex = 0;
    this.about.setAttribute("role", "region");
    this.about.setAttribute("aria-label", "How it was started");
    this.about.replaceChildren(element("table", {}, element("tbody", {}, ...rows.filter(([, text]) => text).map(([name, text]) =>
      element("tr", {}, element("th", { class: "text", scope: "row", text: name }), element("td", { class: "words mono", text }))))));
  }
}
