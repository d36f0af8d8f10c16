// The settings of a chat: what is left empty is the server's choice, which stands in the field.

import { $, el, keepKey, keyOf, on } from "../parts.js";
import { NUMBERS } from "./request.js";

const TEXTS = { system: "system", schema: "schema", stop: "stop-strings", more: "more", thinking: "thinking", tools: "tools" }; // ids of fields
const numbers = new Map(NUMBERS.map((field) => [field.name, row(field)]));
let settings = {};
let change = null;

export const onChange = (act) => { change = act; };

export function introduce({ defaults = {} }) {
	for (const [name, { number }] of numbers) {
		const value = defaults[name];
		number.placeholder = Number.isFinite(value) ? String(value) : "server's";
	}
}

export function show(given) {
	settings = given;
	for (const [name, { number, range }] of numbers) {
		number.value = Number.isFinite(given[name]) ? given[name] : "";
		if (range) range.value = number.value || number.placeholder || range.min;
	}
	for (const [name, id] of Object.entries(TEXTS)) $(id).value = given[name] || "";
}

function row({ name, label, min, max, step }) {
	const id = name.replaceAll("_", "-");
	const number = Object.assign(el("input"), { id, type: "number", min, max: max ?? "", step });
	const range = max === undefined ? null : Object.assign(el("input"), { type: "range", min, max, step, ariaLabel: label + " as a slider" });
	const put = (value) => {
		if (value === "" || !Number.isFinite(Number(value))) delete settings[name];
		else settings[name] = Number(value);
		change();
	};
	number.addEventListener("input", () => {
		if (range && number.value) range.value = number.value;
		put(number.value);
	});
	range?.addEventListener("input", () => {
		number.value = range.value;
		put(range.value);
	});
	$("numbers").append(el("div", "number", Object.assign(el("label", "", label), { htmlFor: id }), ...(range ? [range] : []), number));
	return { number, range };
}

for (const [name, id] of Object.entries(TEXTS)) {
	on(id, "input", () => {
		const value = $(id).value.trim();
		if (value) settings[name] = value;
		else delete settings[name];
		change();
	});
}
on("user-key", "change", (event) => keepKey("user", event.target));
$("user-key").value = keyOf("user");
