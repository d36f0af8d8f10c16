// The keys of the page, and the list of them.

import { $, el, isComposing, on } from "./parts.js";

const KEYS = [
	["/", "write a message"],
	["Enter", "send"],
	["Shift+Enter", "a new line"],
	["Escape", "stop the answer, or close what is open"],
	["n", "a new chat"],
	["e", "edit your last message"],
	["r", "ask for the last answer again"],
	["Ctrl+K", "search the chats"],
	["Alt+↑, Alt+↓", "the chat before, the chat after"],
	["p", "hold the view of the engine"],
	["?", "these keys"],
];

// `acts`: what each key does, by its name in the table; Escape is tried one after the other.
export function start(acts, escape) {
	$("keys-list").replaceChildren(...KEYS.flatMap(([key, words]) => [el("dt", "", el("kbd", "", key)), el("dd", "", words)]));
	const help = $("keys");
	on("keys-show", "click", () => help.showModal());
	on("keys-close", "click", () => help.close());
	document.addEventListener("keydown", (event) => {
		if (isComposing(event) || help.open) return;
		if (event.key === "Escape") return void escape.some((act) => act());
		const name = nameOf(event);
		if (!(name in acts) && name !== "?") return;
		const isTyping = document.activeElement?.matches("input, textarea, select");
		if (isTyping && name.length === 1) return;
		event.preventDefault();
		if (name === "?") help.showModal();
		else acts[name]();
	});
}

function nameOf({ key, ctrlKey, metaKey, altKey }) {
	if (ctrlKey || metaKey) return "Ctrl+" + key.toUpperCase();
	return altKey ? "Alt+" + key : key;
}
