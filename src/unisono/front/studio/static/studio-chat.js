// Chat with a result, and with another model beside it.
import { button, field, h, number, post, problemNodes, put, section, stream, t } from "./studio-parts.js";
import { fillModels, listen, modelIn, pickModel } from "./studio-runs.js";

const parts = {}, sides = [];
let stopper = null, pick = "";
class Side {
  constructor(of) { this.of = of; this.model = null; this.turns = []; this.log = h("ol", { class: "talk" }); this.state = h("p", { class: "soft", role: "status" }); this.title = h("h3", {}); this.node = h("div", { class: "talk-side", "data-side": of }, this.title, this.state, this.log); }
  async load(chosen) {
    this.title.textContent = chosen.base ? t("base_of", chosen) : chosen.step ? t("at_checkpoint", chosen) : chosen.name;
    put(this.state, t("loading_model"));
    const answer = await post("load", chosen);
    if (answer.problems?.length) { put(this.state, problemNodes(answer.problems)); return; }
    this.model = answer.id;
  }
  take(models) {
    const model = models.find((one) => one.id === this.model);
    if (!this.model) return;
    if (!model) { put(this.state, t("unloaded")); this.node.dataset.state = "unloaded"; return; }
    if (this.node.dataset.state === model.state) return;
    this.node.dataset.state = model.state;
    put(this.state, model.state === "failed" ? problemNodes(model.problems) : model.state === "loading" ? `${t("loading_model")} ${model.said}` : model.about);
  }
  get isReady() { return this.node.dataset.state === "ready"; }
  say(role, text) { const node = h("li", { class: role }, h("b", {}, t(`role_${role}`)), h("div", { class: "answer-text" }, text)); this.log.append(node); return node.querySelector(".answer-text"); }
  async answer(settings, signal) {
    const node = this.say("assistant", ""), began = performance.now();
    const answer = await stream(`/api/studio/chat?model=${encodeURIComponent(this.model)}`, { ...settings, model: this.model, messages: [...(settings.messages ?? []), ...this.turns], stream: true }, signal);
    if (!answer.ok) { const value = await answer.json().catch(() => null); node.textContent = value?.error?.message ?? t("no_answer", { status: answer.status }); node.classList.add("error"); return; }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", text = "", count = 0;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const chunk = JSON.parse(line.slice(6)), delta = chunk.choices?.[0]?.delta;
        if (chunk.error) { node.classList.add("error"); text += chunk.error.message; }
        if (delta?.content) { text += delta.content; count += 1; }
        for (const call of delta?.tool_calls ?? []) text += `${call.function?.name ?? ""}${call.function?.arguments ?? ""}`;
        node.textContent = text;
      }
    }
    node.parentNode.append(h("span", { class: "soft" }, t("answered_in", { n: number(count), s: number((performance.now() - began) / 1000) })));
    node.parentNode.dataset.done = "true";
    this.turns.push({ role: "assistant", content: text });
  }
}
const settingsOf = () => {
  const settings = { temperature: Number(parts.temperature.value), max_tokens: Number(parts.most.value) };
  if (parts.topP.value) settings.top_p = Number(parts.topP.value);
  if (parts.system.value.trim()) settings.messages = [{ role: "system", content: parts.system.value }];
  if (parts.tools.value.trim()) settings.tools = JSON.parse(parts.tools.value);
  return settings;
};
const contentOf = async () => {
  const text = parts.text.value, file = parts.picture.files[0];
  if (!file) return text;
  const url = await new Promise((done) => { const reader = new FileReader(); reader.addEventListener("load", () => done(reader.result)); reader.readAsDataURL(file); });
  return [{ type: "text", text }, { type: "image_url", image_url: { url } }];
};
const ask = async (event) => {
  event.preventDefault();
  if (!parts.text.value.trim() || parts.send.disabled) return;
  let settings;
  try { settings = settingsOf(); } catch { put(parts.said, h("p", { class: "note bad", role: "alert" }, t("tools_not_json"))); return; }
  put(parts.said);
  const content = await contentOf(), text = parts.text.value, ready = sides.filter((one) => one.isReady);
  parts.text.value = ""; parts.picture.value = "";
  parts.send.disabled = true; stopper = new AbortController();
  for (const one of ready) { one.turns.push({ role: "user", content }); one.say("user", text); }
  await Promise.all(ready.map((one) => one.answer(settings, stopper.signal).catch((error) => { if (error.name !== "AbortError") put(one.state, String(error)); })));
  stopper = null; update();
  parts.text.focus();
};
const update = () => { parts.send.disabled = stopper !== null || !sides.length || !sides.some((one) => one.isReady) || sides.some((one) => one.node.dataset.state === "loading" || (!one.node.dataset.state && one.model)); parts.stop.hidden = stopper === null; };
const openSides = async () => {
  const first = parts.run.value, second = parts.beside.value;
  stopper?.abort();
  sides.length = 0;
  if (!first) { put(parts.talk, h("p", { class: "empty" }, t("no_results"))); return; }
  sides.push(new Side("result"));
  if (second) sides.push(new Side("beside"));
  put(parts.talk, sides.map((one) => one.node));
  const chosen = modelIn(parts.run);
  await sides[0].load(chosen);
  if (second) await sides[1].load(second === "*base" ? { name: chosen.name, base: true } : modelIn(parts.beside));
};
export const openChat = async (name) => {
  if (name) pick = name;
  fill();
  if (pick && pickModel(parts.run, pick)) pick = "";
  if (!sides.length || name) await openSides();
  parts.text.focus();
};
const fill = () => {
  const isFirst = !parts.beside.options.length;
  fillModels(parts.run);
  fillModels(parts.beside, h("option", { value: "" }, t("nothing")), h("option", { value: "*base" }, t("base_model")));
  if (isFirst) parts.beside.value = "*base";
};
export const buildChat = () => {
  parts.run = h("select", { on: { change: openSides } }); parts.beside = h("select", { on: { change: openSides } });
  parts.temperature = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0" }); parts.most = h("input", { type: "number", min: "1", max: "32768", value: "256" }); parts.topP = h("input", { type: "number", min: "0", max: "1", step: "0.05", placeholder: "1" });
  parts.system = h("textarea", { rows: "2" }); parts.tools = h("textarea", { rows: "3", placeholder: "[{\"type\": \"function\", …}]", spellcheck: false }); parts.picture = h("input", { type: "file", accept: "image/*" });
  parts.text = h("textarea", { id: "message", rows: "2", "aria-label": t("message"), placeholder: t("message"), on: { keydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event); } } });
  parts.send = h("button", { type: "submit", class: "main", disabled: true }, t("send")); parts.stop = button("stop_answer", () => stopper?.abort()); parts.stop.hidden = true;
  parts.talk = h("div", { class: "talk-sides" }, h("p", { class: "empty" }, t("no_results"))); parts.said = h("div", { "aria-live": "polite" });
  listen((latest) => { if (document.getElementById("v-chat").hidden) return; fill(); if (!sides.length && parts.run.value) openChat(pick); for (const one of sides) one.take(latest.models); update(); });
  return section("chat", h("div", { class: "grid-fields" }, field("result_of", parts.run), field("beside", parts.beside)),
    h("details", { "data-keep": "sampling" }, h("summary", {}, t("sampling")), h("div", { class: "inner grid-fields" }, field("temperature", parts.temperature), field("max_tokens", parts.most), field("top_p", parts.topP), field("system_prompt", parts.system), field("tools", parts.tools), field("picture_file", parts.picture))),
    parts.talk, parts.said, h("form", { class: "say", on: { submit: ask } }, parts.text, h("div", { class: "actions" }, parts.send, parts.stop, button("clear_talk", openSides))));
};
