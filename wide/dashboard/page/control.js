// What the run's owner may do: pause, go on, save, stop, send a node away, invite another machine.

import { post } from "./api.js";
import { element, tell } from "./words.js";

export class Control {
  constructor(app, place, dialog, said) {
    Object.assign(this, { app, place, dialog, said });
    this.pause = element("button", { type: "button", text: "Pause", onclick: () => this.ask(this.isPaused ? "resume" : "pause") });
    this.save = element("button", { type: "button", text: "Checkpoint", onclick: () => this.ask("checkpoint") });
    this.invite = element("button", { type: "button", text: "Invite", onclick: () => this.inviting() });
    this.stop = element("button", { type: "button", text: "Stop", class: "danger", onclick: () => this.sure(
      "Stop this run?", "It ends with a checkpoint, and can go on later with --resume.", "Stop it", () => this.ask("stop")) });
    place.replaceChildren(element("span", { class: "tools" }, this.pause, this.save, this.invite, this.stop));
  }

  get may() { return this.app.server.may_steer && this.app.live?.state === "running"; }

  show(live) {
    this.isPaused = Boolean(live.is_paused);
    tell(this.pause, this.isPaused ? "Resume" : "Pause");
    this.invite.hidden = !live.is_served;
    for (const button of [this.pause, this.save, this.invite, this.stop]) button.disabled = live.state !== "running";
  }

  async ask(what, body = {}) {
    try {
      const answer = await post(`/runs/${encodeURIComponent(this.app.run)}/control/${what}`, body);
      if (what !== "invite") this.say(answer.said);
      return answer;
    } catch (trouble) {
      this.say(trouble.message);
      if (trouble.status === 401) this.app.meet();
      return null;
    }
  }

  drop(node, name) {
    this.sure(`Send node ${node} (${name}) away?`, "Its work goes to the others. It does not come back by itself; its machine could join again (wide revoke forbids that).",
      "Send it away", () => this.ask("drop", { node }));
  }

  async inviting() {
    const answer = await this.ask("invite");
    if (!answer) return;
    const picture = answer.qr ? element("img", { src: answer.qr, alt: "The invite as a QR code" }) : null;
    const copy = element("button", { type: "button", text: "Copy", onclick: (event) => navigator.clipboard?.writeText(answer.command).then(() => tell(event.target, "Copied")) });
    this.open("One more machine", element("p", { text: `Run this on the other machine. Keep it secret (${answer.said}).` }),
      element("pre", { class: "mono", text: answer.command }), picture, element("p", { class: "tools" }, copy, this.closing()));
  }

  sure(title, words, yes, then) {
    const button = element("button", { type: "button", class: "danger", text: yes, onclick: () => { this.dialog.close(); then(); } });
    this.open(title, element("p", { text: words }), element("p", { class: "tools" }, button, this.closing("Cancel")));
  }

  closing(text = "Close") { return element("button", { type: "button", text, onclick: () => this.dialog.close() }); }

  open(title, ...content) {
    this.dialog.setAttribute("aria-label", title);
    this.dialog.replaceChildren(element("h2", { text: title }), ...content.filter(Boolean));
    this.dialog.showModal();
  }

  say(words) {
    tell(this.said, words);
    this.said.hidden = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.said.hidden = true; }, 6000);
  }
}
