// The messages of a chat as parts of the page: a question, an answer with its actions and what it
// cost, the result of a tool.

import { button, copier, el, isComposing, join } from "../parts.js";
import { Writing } from "../text/writing.js";
import { cutOf, isElsewhere } from "./request.js";
import { costs, place } from "./costs.js";
import { chip } from "./attach.js";

class Message {
	constructor(acts, kind) {
		this.acts = acts;
		this.box = el("article", kind);
		this.foot = el("div", "acts");
		this.foot.role = "group";
	}

	// A switch between the versions of this message, if there are several.
	switcher(node, versions) {
		const at = versions.indexOf(node);
		if (versions.length < 2) return [];
		const to = (step, sign, words) => {
			const made = button(sign, () => this.acts.pick(versions[at + step]));
			made.disabled = !versions[at + step];
			made.ariaLabel = words;
			return made;
		};
		return [el("span", "versions", to(-1, "‹", "Version before"), `${at + 1} of ${versions.length}`, to(1, "›", "Version after"))];
	}

	action(words, act, title = "") {
		return Object.assign(button(words, act), { title });
	}

	common(node) {
		return [
			this.action("Edit", () => this.edit()),
			copier("Copy", () => node.text),
			this.action("Branch", () => this.acts.branch(node), "A new chat that begins with the messages up to here"),
			this.action("Delete", (event) => twice(event.target, () => this.acts.remove(node)), "This message and all that follow it"),
		];
	}

	// A text area in the place of the message, until it is kept or given up.
	editor(node, words) {
		const area = Object.assign(el("textarea", "edit"), { value: node.text, ariaLabel: "Edit the message" });
		const end = () => { form.remove(); this.body.hidden = this.foot.hidden = false; };
		const keep = () => { end(); this.acts.edit(node, area.value); };
		const form = el("div", "editor", area, el("div", "acts", button(words, keep, "do"), button("Cancel", end)));
		area.addEventListener("keydown", (event) => {
			if (isComposing(event)) return;
			if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) keep();
			if (event.key !== "Escape") return;
			event.stopPropagation();
			end();
		});
		this.body.hidden = this.foot.hidden = true;
		this.box.append(form);
		area.focus();
	}
}

// Asks before it acts: the first click changes the words of the button.
export function twice(asked, act) {
	if (asked.dataset.sure) return act();
	const words = asked.textContent;
	asked.dataset.sure = "yes";
	asked.textContent = "Really?";
	asked.addEventListener("blur", () => {
		delete asked.dataset.sure;
		asked.textContent = words;
	}, { once: true });
}

export class Question extends Message {
	constructor(acts) {
		super(acts, "me");
		this.body = el("div");
		this.box.append(this.body, this.foot);
		this.box.ariaLabel = "You";
		this.foot.ariaLabel = "Actions of this question";
	}

	update(node, versions) {
		this.node = node;
		const files = (node.files || []).map((file) => chip(file));
		this.body.replaceChildren(...(files.length ? [el("div", "chips", ...files)] : []), el("p", "said", node.text));
		this.foot.replaceChildren(...this.switcher(node, versions), ...this.common(node));
	}

	edit() {
		this.editor(this.node, "Send");
	}
}

export class Answer extends Message {
	constructor(acts) {
		super(acts, "it");
		this.box.ariaLabel = "Answer";
		this.foot.ariaLabel = "Actions of this answer";
		this.summary = el("summary", "", "Reasoning");
		this.thought = el("p", "facts");
		this.fold = el("details", "", this.summary, this.thought);
		this.fold.hidden = true;
		this.calls = el("div", "calls");
		this.under = el("div", "under");
		this.body = el("div", "md");
		this.box.append(this.fold, this.body, this.calls, this.under, this.foot);
	}

	update(node, versions, { isGrowing, isLast }) {
		const isNew = this.node !== node || this.wasGrowing !== isGrowing;
		const isOpen = isGrowing || isElsewhere(node);
		this.node = node;
		this.wasGrowing = isGrowing;
		this.box.classList.toggle("busy", isOpen);
		this.box.classList.toggle("bad", Boolean(node.error));
		this.box.ariaBusy = isOpen;
		if (isNew) this.grow();
		if (isOpen) {
			this.under.replaceChildren(...(isGrowing ? [] : [el("div", "after", cutOf(node))]));
			this.foot.replaceChildren();
			return;
		}
		this.end();
		const goesOn = isLast && node.text && (node.error || cutOf(node));
		this.foot.replaceChildren(
			...this.switcher(node, versions),
			...(goesOn ? [this.action("Continue", () => this.acts.goOn(node), "Go on where this answer was cut")] : []),
			this.action(node.error ? "Try again" : "Regenerate", () => this.acts.again(node)),
			...this.common(node),
		);
	}

	grow() {
		const { text, thought, calls = [] } = this.node;
		this.fold.hidden = !thought;
		if (thought) {
			this.summary.textContent = text || calls.length || !this.wasGrowing ? "Reasoning" : "Reasoning…";
			addText(this.thought, thought);
		}
		if (!this.writing || !text.startsWith(this.written)) {
			this.body.replaceChildren();
			this.writing = new Writing(this.body);
		}
		this.written = text;
		this.writing.write(text);
		this.calls.replaceChildren(...calls.map(call));
	}

	end() {
		const { node } = this;
		if (this.ended !== node.text) this.writing.end(node.text);
		this.ended = node.text;
		const lines = [];
		if (node.error) lines.push(el("p", "err", node.error));
		const { facts, why } = costs(node);
		if (why) lines.push(el("p", "facts why", why));
		lines.push(el("div", "after", join(cutOf(node), ...facts), ...place(node)));
		this.under.replaceChildren(...lines);
	}

	edit() {
		this.editor(this.node, "Keep");
	}
}

const call = ({ name, args }) => el("details", "call", el("summary", "", "calls ", el("b", "", name)), el("pre", "", pretty(args)));

export function pretty(text) {
	try {
		return JSON.stringify(JSON.parse(text), null, 2);
	} catch {
		return text;
	}
}

const FAILED = "error: "; // begins the result of a call that has failed

export class Result extends Message {
	constructor(acts) {
		super(acts, "tool");
		this.box.ariaLabel = "Result of a tool";
	}

	update({ name, text }) {
		const made = el("details", "call", el("summary", "", "result of ", el("b", "", name)), el("pre", "", pretty(text)));
		made.open = text.startsWith(FAILED);
		this.box.replaceChildren(made);
	}
}

// A growing text without drawing what is there.
function addText(box, text) {
	const last = box.firstChild;
	if (last && text.startsWith(last.data)) last.appendData(text.slice(last.length));
	else box.textContent = text;
}
