// Which half of the page is to be seen: the chat, the engine, or on a desk both.

import { $, on } from "./parts.js";

const NAMES = ["chat", "both", "engine"];
const phone = matchMedia("(width < 861px)");
let shown = "both";

export const isPhone = () => phone.matches;

function show(name) {
	shown = phone.matches && name === "both" ? "chat" : name;
	$("main").dataset.view = shown;
	for (const one of NAMES) $("tab-" + one).ariaPressed = one === shown;
}

function choose(name) {
	localStorage.setItem("weft-view", name);
	show(name);
}

// Makes a half visible, without hiding what a desk has room for.
export function see(name) {
	if (shown !== name && shown !== "both") show(phone.matches ? name : "both");
}

export function start() {
	for (const name of NAMES) on("tab-" + name, "click", () => choose(name));
	const begin = () => show(phone.matches ? "chat" : NAMES.find((one) => one === localStorage.getItem("weft-view")) || "both");
	phone.addEventListener("change", begin);
	begin();
}
