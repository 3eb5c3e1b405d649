// The page as a whole: which run, which of its pages, and what is new. Each page draws itself.

import { get, listen, takeKey } from "./api.js";
import { redrawAll } from "./charts.js";
import { Control } from "./control.js";
import { Events } from "./events.js";
import { Network } from "./network.js";
import { Nodes } from "./nodes.js";
import { Overview } from "./overview.js";
import { Timeline } from "./timeline.js";
import { element, tell } from "./words.js";

const PAGES = { overview: Overview, nodes: Nodes, timeline: Timeline, network: Network, events: Events };
const THEME = "wide.theme";
const STATES = { running: "good", done: "good", paused: "warm", interrupted: "warm" };
const $ = (id) => document.getElementById(id);

class App {
  constructor() {
    this.server = { runs: [], may_steer: false };
    this.run = null; // its name
    this.news = new Map(); // by run: the last we heard
    this.pages = {};
    this.shown = "";
    this.number = -1;
    this.control = new Control(this, $("control"), $("dialog"), $("said"));
  }

  async begin() {
    addEventListener("hashchange", () => {
      if (takeKey()) location.reload(); // another link was pasted
      else if (location.hash === "#content") $("content").focus();
      else this.turn();
    });
    listen((told) => this.hear(told), (trouble) => this.lost(trouble));
    await this.meet();
  }

  // What there is to see here. Again and again, until somebody answers.
  async meet() {
    try {
      this.server = await get("");
    } catch (trouble) {
      this.lost(trouble);
      setTimeout(() => this.meet(), 2000);
      return;
    }
    if (!this.server.runs.includes(this.run)) this.run = this.server.runs[0];
    $("run").replaceChildren(...this.server.runs.map((name) => element("option", { value: name, text: name })));
    $("run").hidden = this.server.runs.length < 2;
    $("run").onchange = () => this.choose($("run").value);
    $("control").hidden = !this.server.may_steer;
    this.turn();
  }

  choose(run) {
    this.run = run;
    for (const page of Object.values(this.pages)) page.forget?.();
    this.head();
    this.page?.show();
  }

  get page() { return this.pages[this.shown]; }
  get live() { return this.news.get(this.run) || null; }

  turn() {
    const wish = location.hash.replace(/^#\//, "");
    const name = wish in PAGES ? wish : "overview";
    if (!this.run) return;
    this.page?.hide?.();
    this.shown = name;
    for (const other of Object.keys(PAGES)) $(other).hidden = other !== name;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.pages[name] ??= new PAGES[name]($(name), this);
    this.page.show();
    if (this.live) this.page.hear?.(this.live, true);
  }

  hear(told) {
    const isNext = told.number === this.number + 1;
    this.number = told.number;
    $("trouble").hidden = true;
    for (const one of told.runs) {
      const before = this.news.get(one.run);
      this.news.set(one.run, { ...one, at: told.at });
      const isAnew = before && before.beginnings !== one.beginnings;
      for (const page of Object.values(this.pages)) page.learn?.(one, isNext && !isAnew);
    }
    this.isLast = told.is_last;
    this.head();
    if (this.live) this.page?.hear?.(this.live, false);
    if (!this.server.runs.length || !told.runs.some((one) => one.run === this.run)) this.meet();
  }

  lost(trouble) {
    const words = trouble?.message
      || (this.isLast ? "This dashboard has ended with its run. To see it again: wide dashboard RUN" : "The dashboard does not answer; looking for it …");
    tell($("trouble"), words);
    $("trouble").hidden = false;
    if (trouble?.status === 401 && !this.live) tell($("state"), "locked");
  }

  head() {
    const live = this.live;
    if (!live) return;
    const state = live.state === "running" && live.is_paused ? "paused" : live.state;
    tell($("job"), live.job || live.run);
    tell($("state"), state);
    $("state").className = `badge ${STATES[state] || "bad"}`;
    $("exact").hidden = live.is_exact === undefined;
    tell($("exact"), live.is_exact ? `${live.strategy} · exact` : `${live.strategy} · not exact`);
    $("exact").className = `badge ${live.is_exact ? "good" : "warm"}`;
    $("exact").title = live.is_exact ? "The same bits from any pool, to the last one" : "What comes out depends on who took part";
    tell($("sha"), live.weights_sha256 ? `weights ${live.weights_sha256.slice(0, 12)}…` : "");
    $("sha").title = live.weights_sha256 ? `sha256 of the last checkpoint: ${live.weights_sha256}` : "";
    const part = live.steps ? `${Math.floor((100 * live.step) / live.steps)} % · ` : "";
    document.title = `${live.state === "running" ? part : ""}${live.job || live.run} · WIIIIIDE`;
    this.control.show(live);
  }
}

function setTheme(wish) {
  const isDark = wish ? wish === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

setTheme(localStorage.getItem(THEME));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { setTheme(localStorage.getItem(THEME)); redrawAll(); });
$("theme").addEventListener("click", () => {
  const wish = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, wish);
  setTheme(wish);
  redrawAll();
  app.page?.redraw?.();
});

const app = new App();
app.begin();
