// The list of chats: search, open, rename, delete, and files to keep or read.

import { $, button, el, isComposing, on } from "../parts.js";
import { twice } from "./message.js";
import { complain } from "./log.js";
import * as store from "./store.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";
import { isPhone } from "../views.js";

const DAYS = [["Today", 0], ["Yesterday", 1], ["Last week", 7], ["Last month", 31], ["Earlier", Infinity]];

let chats = { open() {}, renamed() {}, isBusy: () => false };
let current = "";
let shown = []; // chats in the list

export const use = (made) => { chats = made; };

export function mark(id) {
	current = id;
	for (const item of $("chat-list").querySelectorAll("[data-id]")) item.setAttribute("aria-current", item.dataset.id === id);
}

export async function draw() {
	const words = $("chat-search").value.trim();
	const found = words && await store.search(words);
	const all = await store.chats();
	if (words !== $("chat-search").value.trim()) return;
	shown = found ? all.filter(({ id }) => found.has(id)) : all;
	const made = [];
	let day = "";
	for (const chat of shown) {
		const next = dayOf(chat.at);
		if (next !== day) made.push(el("li", "day", next));
		day = next;
		made.push(item(chat, found ? found.get(chat.id) : ""));
	}
	if (!made.length) made.push(el("li", "none", words ? "No chat has these words." : "Your chats stay in this browser."));
	$("chat-list").replaceChildren(...made);
	mark(current);
}

function dayOf(at) {
	const midnight = new Date().setHours(0, 0, 0, 0);
	const ago = Math.ceil((midnight - at) / 86_400_000);
	return DAYS.find(([, days]) => ago <= days)[0];
}

function item(chat, place) {
	const title = button("", () => open(chat.id), "title");
	title.append(el("span", "", chat.title || "New chat"), ...(place ? [el("small", "", place)] : []));
	title.dataset.id = chat.id;
	if (chats.isBusy(chat.id)) title.append(el("small", "", "answers…"));
	const made = el("li", "", title);
	const menu = el("details", "menu", Object.assign(el("summary", "", "⋯"), { ariaLabel: "Actions of " + chat.title }), el("div", "acts",
		button("Rename", () => rename(made, chat)),
		button("Markdown", async () => save(`${fileOf(chat)}.md`, "text/markdown", toMarkdown(chat, await store.nodes(chat.id)))),
		button("JSON", async () => save(`${fileOf(chat)}.json`, "application/json", toJson([[chat, await store.nodes(chat.id)]]))),
		button("Delete", (event) => twice(event.target, () => remove(chat.id))),
	));
	made.append(menu);
	return made;
}

async function open(id) {
	await chats.open(id);
	if (isPhone()) toggle(false);
	$("text").focus({ preventScroll: true });
}

function rename(box, chat) {
	const field = Object.assign(el("input"), { value: chat.title, ariaLabel: "Title of the chat" });
	const end = async (isKept) => {
		field.onblur = null;
		const title = field.value.trim();
		if (isKept && title) {
			const now = await store.chat(chat.id);
			await store.save({ ...now, title });
			chats.renamed(chat.id, title);
		}
		await draw();
		$("chat-list").querySelector(`[data-id="${chat.id}"]`)?.focus();
	};
	field.onblur = () => end(true);
	field.addEventListener("keydown", (event) => {
		event.stopPropagation();
		if (isComposing(event)) return;
		if (event.key === "Enter") end(true);
		if (event.key === "Escape") end(false);
	});
	box.replaceChildren(field);
	field.select();
	field.focus();
}

async function remove(id) {
	const at = shown.findIndex((chat) => chat.id === id);
	await store.remove(id);
	localStorage.removeItem("weft-draft-" + id);
	store.removeDraft(id);
	await draw();
	if (id === current) await chats.open(shown[Math.min(at, shown.length - 1)]?.id);
	($("chat-list").querySelector("[data-id]") || $("chat-new")).focus();
}

// The chat before or after the shown one.
export function step(by) {
	const at = shown.findIndex((chat) => chat.id === current);
	const next = shown[Math.min(Math.max(at + by, 0), shown.length - 1)];
	if (next) chats.open(next.id);
}

// ---- files

const fileOf = ({ title }) => title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat";

function save(name, type, text) {
	const link = Object.assign(el("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
	link.click();
	setTimeout(() => URL.revokeObjectURL(link.href), 1_000);
}

on("chats-export", "click", async () => {
	const all = await store.chats();
	const pairs = await Promise.all(all.map(async (chat) => [chat, await store.nodes(chat.id)]));
	save("weft-chats.json", "application/json", toJson(pairs));
});

on("chats-import", "change", async () => {
	const [file] = $("chats-import").files;
	$("chats-import").value = "";
	if (!file) return;
	try {
		const pairs = fromJson(await file.text(), store.newId);
		for (const [chat, nodes] of pairs) {
			for (const node of nodes.values()) await store.saveNode(node);
			await store.save(chat);
		}
		await draw();
		if (pairs.length) await open(pairs[0][0].id);
	} catch (error) {
		complain(`${file.name}: ${error.message}`);
	}
});

// ---- on a narrow page the list lies over the chat

function toggle(isOpen) {
	$("main").toggleAttribute("data-chats", isOpen);
	$("chats-show").ariaExpanded = isOpen;
	if (isOpen) $("chat-search").focus();
}

// Returns whether it was open.
export function close() {
	const wasOpen = $("main").hasAttribute("data-chats");
	if (wasOpen) {
		toggle(false);
		$("chats-show").focus();
	}
	return wasOpen;
}

export function search() {
	toggle(true);
	$("chat-search").select();
}

on("chats-show", "click", () => toggle(!$("main").hasAttribute("data-chats")));
on("chat-search", "input", draw);
